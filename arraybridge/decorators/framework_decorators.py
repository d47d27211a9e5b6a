"""One decorator per framework. Each runs a function in its framework and accepts arrays of any framework.

Each decorator is explicitly assigned to a name, so that editors and type checkers see it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Unpack, overload

from arraybridge.compilers import exempt
from arraybridge.decorators.wrapping import Decorated, P, R, decorate, kind_of_function, label_of, wrap
from arraybridge.hooks import hooks
from arraybridge.interface import registry
from arraybridge.types import FrameworkLike
from arraybridge.validation import add_hints

if TYPE_CHECKING:
    from arraybridge.decorators.decorated_call import DecoratedCall
    from arraybridge.decorators.options import DecoratorKeywords, DecoratorOptions

__all__ = ["cupy", "jax", "memory_types", "mlx", "numpy", "paddle", "pyclesperanto", "tensorflow", "torch"]


class FrameworkDecorator:
    """A decorator that runs a function in one framework and accepts arrays of any framework.

    It is used without options, as ``@torch``, or with options, as ``@torch(gpu_id=0)``. See `__call__`.

    >>> import numpy as np, arraybridge
    >>> @arraybridge.torch(output_type="input")
    ... def halve(image):
    ...     return image / 2  # a torch tensor here
    >>> halve(np.array([1.0, 3.0]))
    array([0.5, 1.5])
    """

    autograph_info__: ClassVar[
        dict[str, Any]
    ] = {}  # AutoGraph reads this attribute of the object; see `exempt`

    def __init__(self, name: str) -> None:
        #: The framework in which the decorated functions run.
        self.name = registry.framework_name(name)

    def __repr__(self) -> str:
        return f"<arraybridge decorator {self.name!r}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return (decorator_of, (self.name,))

    if not TYPE_CHECKING:  # type checkers report unknown attributes themselves

        def __getattr__(self, attribute: str) -> NoReturn:
            raise AttributeError(
                f"arraybridge.{self.name} is a decorator and has no attribute {attribute!r}. To use"
                f" {self.name}.{attribute}, import the framework itself, and write the decorator as"
                f" @arraybridge.{self.name}."
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
    @exempt
    def __call__(self, *fn: Any, **options: Any) -> Any:
        """Decorate a function, or return a decorator with these options.

        Calling the decorated function converts the arrays in its arguments to the framework, calls the
        function, and converts the arrays in its result to ``output_type``. NumPy scalars in the result are
        converted as well, unless they would become NumPy arrays. Containers are traversed. All other values
        are passed on unchanged.

        Args:
            fn: A function, method, static method, class method, coroutine function, partial or callable
                object.
            output_type: The framework of the results. ``"input"`` restores the framework and the device of
                the first array in the arguments. Defaults to the framework of the decorator, and to
                ``"input"`` with ``grad="flow"``.
            **options: ``gpu_id``, ``device``, ``input_type``, ``strict``, ``oom_recovery``, ``max_retries``,
                ``split_axis``, ``min_split``, ``dtype``, ``dtype_conversion``, ``slice_by_slice``,
                ``contract``, ``grad``, ``x64`` and ``stream``. The class `DecoratorKeywords` of
                ``arraybridge.decorators.options`` describes them.

        Returns:
            A function with the name, docstring, signature and type hints of ``fn``, and with the attributes
            ``input_memory_type``, ``output_memory_type``, ``execution_memory_type``, ``gpu_id``, ``device``
            and ``dtype_conversion``. Without ``fn``, a decorator.

        Raises:
            TypeError: If ``fn`` is not a function, or an option is unknown or of the wrong type.
            ValueError: If ``fn`` is a generator function, or an option has an invalid value
                (`UnknownFrameworkError` for an unknown framework).

        Exceptions raised by the function propagate; an `AttributeError` or `TypeError` gets a note if a list
        was passed in the place of an array. A call raises a `MemoryConversionError` that names the function
        and the argument, or the place in the result, if an array cannot be converted, and
        `UnknownArrayError` if no argument is an array but one has ``__array__``, such as a table of several
        dtypes.

        >>> import numpy as np, arraybridge
        >>> double = arraybridge.numpy(lambda x: x * 2)
        >>> double(np.array([1, 2]))
        array([2, 4])
        """
        if fn and options:
            decorator_text = f"@{self.name}({', '.join(f'{name}=...' for name in options)})"
            raise TypeError(
                f"@{self.name} expects a function or options, not both. Put {decorator_text} above the"
                " function."
            )
        decorator = _decorator(f"@{self.name}", self.name, options)
        if len(fn) > 1:
            raise TypeError(
                f"@{self.name} expects one function, got {len(fn)} positional arguments. Pass options by"
                f" keyword, such as @{self.name}(output_type='input')."
            )
        return decorator(*fn) if fn else decorator


# -- the decorated function ----------------------------------------------------------------------------


def _decorator(
    what: str, framework: str, keywords: dict[str, Any], *, converts: bool = True
) -> Callable[[Any], Any]:
    # Imported on first use, because this takes a fifth of the time of `import arraybridge`.
    from arraybridge.decorators.options import check_keywords

    options = check_keywords(framework, keywords, converts=converts)
    call_class = _class_of_calls(options)

    def make(fn: Any) -> Any:
        for option in ("oom_recovery", "slice_by_slice"):
            if getattr(options, option) and kind_of_function(fn) == "coroutine":
                raise ValueError(
                    f"{what}({option}=...) calls a function more than once, but {label_of(fn)} is a coroutine"
                    " function. Decorate a plain function that it calls."
                )
        rewritable = registry.metadata_of(options.framework).rewrites_functions
        wrapper = wrap(fn, call_class(fn, options), rewritable=rewritable)
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
        # Imported on first use, because this takes a tenth of the time of `import arraybridge`.
        from arraybridge.decorators.gradient_flow import FlowingCall

        return FlowingCall
    return ConvertingCall


@add_hints
def memory_types(
    input_type: FrameworkLike, output_type: FrameworkLike, contract: Callable[[Any], Any] | None = None
) -> Callable[[Callable[P, R]], Decorated[P, R]]:
    """Declare the frameworks of the arguments and results of a function, without converting them.

    Args:
        input_type: The framework of the array arguments, in which the function runs; available as the
            attributes ``input_memory_type`` and ``execution_memory_type`` of the decorated function.
        output_type: The framework of the results; available as the attribute ``output_memory_type``.
        contract: A function of the result. If it returns a false value other than None, the call raises
            `ValueError`.

    Returns:
        A decorator.

    Raises:
        UnknownFrameworkError: If a framework is unknown.
        TypeError: If ``contract`` or the decorated object is not a function.

    >>> import numpy as np
    >>> @memory_types("numpy", "numpy")
    ... def invert(image):
    ...     return 255 - image
    >>> invert.input_memory_type, invert(np.array([1, 2], np.uint8))
    ('numpy', array([254, 253], dtype=uint8))
    """
    takes = registry.framework_name(input_type, "input_type")
    keywords = {"output_type": registry.framework_name(output_type, "output_type"), "contract": contract}
    return _decorator("@memory_types", takes, keywords, converts=False)


# -- the instances -------------------------------------------------------------------------------------


@cache
def decorator_of(name: str) -> FrameworkDecorator:
    """Return the decorator of a framework. Repeated calls return the same object.

    Frameworks that plug-ins add have decorators as well.

    Args:
        name: The name of the framework, such as ``"torch"``.

    Raises:
        UnknownFrameworkError: If there is no framework of that name.

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
