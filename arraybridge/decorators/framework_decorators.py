"""The decorators: write a function in one framework, call it with any array.

One callable class, `FrameworkDecorator`, and by hand an instance for each framework, so that editors and
type checkers see them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NoReturn, Unpack, overload

from arraybridge.decorators.wrapping import Decorated, P, R, decorate, kind_of_function, label_of, wrap
from arraybridge.frameworks import registry
from arraybridge.types import FrameworkLike, hooks

if TYPE_CHECKING:
    from arraybridge.decorators.decorated_call import DecoratedCall
    from arraybridge.decorators.options import DecoratorKeywords, DecoratorOptions

__all__ = ["cupy", "jax", "memory_types", "mlx", "numpy", "paddle", "pyclesperanto", "tensorflow", "torch"]


class FrameworkDecorator:
    """Runs a function in one framework, whatever arrays it is called with.

    Used bare, ``@torch``, or called with options, ``@torch(gpu_id=0)``; see `__call__`.

    >>> import numpy as np, arraybridge
    >>> @arraybridge.torch(output_type="input")
    ... def halve(image):
    ...     return image / 2  # a torch tensor here
    >>> halve(np.array([1.0, 3.0]))
    array([0.5, 1.5])
    """

    def __init__(self, name: str) -> None:
        #: The framework that the functions run in.
        self.name = registry.framework_name(name)

    def __repr__(self) -> str:
        return f"<arraybridge decorator {self.name!r}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return (decorator_of, (self.name,))

    if not TYPE_CHECKING:  # a type checker knows without this that there is no such attribute

        def __getattr__(self, attribute: str) -> NoReturn:
            raise AttributeError(
                f"arraybridge.{self.name} is a decorator and has no {attribute!r}; import the framework under"
                f" a name of its own for {self.name}.{attribute}"
            )

    @overload
    def __call__(self, fn: Callable[P, R], /) -> Decorated[P, R]: ...
    @overload
    def __call__(
        self, *, output_type: None = None, **options: Unpack[DecoratorKeywords]
    ) -> Callable[[Callable[P, R]], Decorated[P, R]]: ...
    @overload
    def __call__(
        self, *, output_type: FrameworkLike, **options: Unpack[DecoratorKeywords]
    ) -> Callable[[Callable[P, Any]], Decorated[P, Any]]: ...
    def __call__(self, *fn: Any, **options: Any) -> Any:  # the options are listed one by one
        """Decorate a function, or take the options and return the decorator that does.

        Arrays among the arguments, in containers too, are converted to the framework; the function runs; the
        arrays of its result are converted to ``output_type``, NumPy's scalars likewise. All else passes.

        Args:
            fn: a function, method, static or class method, coroutine function, partial or object that can be
                called.
            output_type: the framework of the results: the decorator's own where left out, ``"input"`` for
                the framework and the device of the first array among the arguments.
            **options: those of `DecoratorKeywords`, each of which says what it means.

        Returns:
            a function with the name, docstring, signature and type hints of ``fn``, on which
            ``input_memory_type``, ``output_memory_type``, ``execution_memory_type``, ``gpu_id``, ``device``
            and ``dtype_conversion`` can be read; or a decorator.

        Raises:
            TypeError: ``fn`` is no function, an option is unknown or of the wrong type.
            ValueError: ``fn`` is a generator, or an option has no sense; `UnknownFrameworkError` for the name
                of a framework.

        A call raises what the function raises, and a `MemoryConversionError` that names the function and the
        argument, or the place in the result, if an array cannot be converted. A call raises
        `UnknownArrayError` if no argument is an array, but one offers ``__array__``, such as a table of
        several dtypes.
        """
        if fn and options:
            words = f"@{self.name}({', '.join(f'{name}=…' for name in options)})"
            raise TypeError(
                f"@{self.name} takes a function or options, not both; put {words} above the function"
            )
        decorator = _decorator(f"@{self.name}", self.name, options)
        if len(fn) > 1:
            raise TypeError(f"@{self.name} takes one function, not {len(fn)} arguments; options go by name")
        return decorator(*fn) if fn else decorator


# -- the function around the function ------------------------------------------------------------------


def _decorator(
    what: str, framework: str, keywords: dict[str, Any], *, converts: bool = True
) -> Callable[[Any], Any]:
    # What a decorated function needs takes a fifth of the time of `import arraybridge`.
    from arraybridge.decorators.options import checked_options

    options = checked_options(framework, keywords, converts=converts)
    call_class = _class_of_calls(options)

    def make(fn: Any) -> Any:
        for option in ("oom_recovery", "slice_by_slice"):
            if getattr(options, option) and kind_of_function(fn) == "coroutine":
                raise ValueError(f"{what}({option}=…) repeats calls, and {label_of(fn)} is a coroutine")
        wrapper = wrap(fn, call_class(fn, options))
        vars(wrapper).update(
            input_memory_type=options.input_type or options.framework,
            output_memory_type=options.output_type,
            execution_memory_type=options.framework,
            gpu_id=options.gpu_id,
            device=options.device,
            dtype_conversion=options.dtype_conversion,
            _placement=options.placement,
        )
        return wrapper

    return partial(decorate, what=what, make=make)


def _class_of_calls(options: DecoratorOptions) -> type[DecoratedCall]:
    from arraybridge.decorators.decorated_call import ConvertingCall, DecoratedCall

    if not options.converts:
        return DecoratedCall
    if options.grad == "flow":
        # Only here: it takes a tenth of the time of `import arraybridge`.
        from arraybridge.decorators.gradient_flow import FlowingCall

        return FlowingCall
    return ConvertingCall


def memory_types(
    input_type: FrameworkLike, output_type: FrameworkLike, contract: Callable[[Any], Any] | None = None
) -> Callable[[Callable[P, R]], Decorated[P, R]]:
    """Declare which arrays a function takes and returns; nothing is converted.

    Args:
        input_type: the framework of the arrays that it takes, readable as ``input_memory_type`` and, since it
            runs in that framework, as ``execution_memory_type``.
        output_type: the framework of its results, readable as ``output_memory_type``.
        contract: is called with the result; where it returns a false value, the call raises `ValueError`.

    Raises:
        UnknownFrameworkError: a name is unknown.
        TypeError: ``contract``, or what is decorated, is no function.

    >>> import numpy as np
    >>> @memory_types("numpy", "numpy")
    ... def invert(image):
    ...     return 255 - image
    >>> invert.input_memory_type, invert(np.array([1, 2], np.uint8))
    ('numpy', array([254, 253], dtype=uint8))
    """
    takes = registry.framework_name(input_type)
    keywords = {"output_type": registry.framework_name(output_type), "contract": contract}
    return _decorator("@memory_types", takes, keywords, converts=False)


# -- one for each framework ----------------------------------------------------------------------------


@cache
def decorator_of(name: str) -> FrameworkDecorator:
    """The decorator of a framework, that of a plugin included; always the same object.

    Raises:
        UnknownFrameworkError: there is no framework of that name.

    >>> import arraybridge
    >>> arraybridge.framework("torch").decorator is decorator_of("torch") is arraybridge.torch
    True
    """
    return FrameworkDecorator(name)


numpy = decorator_of("numpy")
cupy = decorator_of("cupy")
torch = decorator_of("torch")
jax = decorator_of("jax")
tensorflow = decorator_of("tensorflow")
pyclesperanto = decorator_of("pyclesperanto")
mlx = decorator_of("mlx")
paddle = decorator_of("paddle")

hooks.decorator_of = decorator_of
