"""The decorators: write a function in one framework, call it with any array.

One callable class, `FrameworkDecorator`, and by hand an instance for each framework, so that editors and
type checkers see them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, Literal, NoReturn, ParamSpec, Protocol, TypeVar, overload

from arraybridge.errors import UnknownFrameworkError, nearest
from arraybridge.frameworks import registry
from arraybridge.frameworks.base import set_decorator_maker
from arraybridge.functions.dtypes import DtypeConversion
from arraybridge.functions.runner import Declaration, Options, Runner
from arraybridge.types import Device, DeviceLike, FrameworkLike, GpuId, check_gpu_id

__all__ = [
    "Decorated",
    "FrameworkDecorator",
    "cupy",
    "decorator_of",
    "jax",
    "memory_types",
    "numpy",
    "pyclesperanto",
    "tensorflow",
    "torch",
]

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Decorated(Protocol[P, R_co]):
    """What a decorator makes of a function, to a type checker.

    The first form of the call keeps the function's own signature for editors; the second accepts whatever a
    caller holds, since arrays of every framework are welcome.
    """

    input_memory_type: str
    output_memory_type: str
    execution_memory_type: str
    gpu_id: GpuId
    device: DeviceLike | None
    dtype_conversion: DtypeConversion

    @property
    def __name__(self) -> str: ...
    @property
    def __wrapped__(self) -> Callable[P, Any]: ...
    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    @overload
    def __call__(self, *args: Any, **kwargs: Any) -> R_co: ...

    # A method: self is given by the attribute access.
    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Decorated[P, R_co]: ...
    @overload
    def __get__(
        self: Decorated[Concatenate[Any, Q], R_co], instance: object, owner: type | None = None
    ) -> Decorated[Q, R_co]: ...


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
                f" a name of its own for {self.name}.{attribute}",
                name=attribute,
                obj=self,
            )

    @overload
    def __call__(self, fn: Callable[P, R], /) -> Decorated[P, R]: ...
    @overload
    def __call__(
        self,
        *,
        output_type: None = None,
        gpu_id: GpuId = None,
        device: DeviceLike | None = None,
        input_type: FrameworkLike | None = None,
        strict: bool = False,
        oom_recovery: bool | Literal["split"] = False,
        max_retries: int = 2,
        split_axis: int = 0,
        min_split: int = 1,
        dtype_conversion: DtypeConversion = DtypeConversion.NATIVE_OUTPUT,
        slice_by_slice: bool = False,
        contract: Callable[[Any], Any] | None = None,
        grad: Literal["error", "detach"] = "error",
    ) -> _Keeping: ...
    @overload
    def __call__(
        self,
        *,
        output_type: FrameworkLike,
        gpu_id: GpuId = None,
        device: DeviceLike | None = None,
        input_type: FrameworkLike | None = None,
        strict: bool = False,
        oom_recovery: bool | Literal["split"] = False,
        max_retries: int = 2,
        split_axis: int = 0,
        min_split: int = 1,
        dtype_conversion: DtypeConversion = DtypeConversion.NATIVE_OUTPUT,
        slice_by_slice: bool = False,
        contract: Callable[[Any], Any] | None = None,
        grad: Literal["error", "detach"] = "error",
    ) -> _Changing: ...
    def __call__(self, *fn: Any, **options: Any) -> Any:  # noqa: D417  # the options are listed one by one
        """Decorate a function, or take the options and return the decorator that does.

        Arrays among the arguments, in containers too, are converted to the framework; the function runs; the
        arrays of its result are converted to ``output_type``. All else passes as it is: scalars, strings,
        None, ``self``, models, callables. Dicts, lists, tuples, named tuples, deques, and dataclasses that
        are registered with optree are looked into.

        Args:
            fn: a function, method, static or class method, coroutine function, generator function, partial or
                object that can be called.
            gpu_id: the accelerator to run on, or ``"auto"`` for the one with the most free memory. Left out,
                arrays stay where they are, or go to the host where the framework does not reach them.
            device: any device in words instead, as ``"cpu:1"``.
            input_type: the framework that callers are expected to bring; readable as ``input_memory_type``.
            strict: refuse arrays of any other framework than ``input_type``.
            output_type: the framework of the results: the decorator's own where left out, ``"input"`` for
                the framework and the device of the first array among the arguments.
            oom_recovery: True frees memory and tries again when memory runs out; ``"split"`` also halves the
                batch. Plain functions only.
            max_retries: how often to try again.
            split_axis, min_split: the axis to halve along, and the extent that is not halved any more.
            dtype_conversion: the dtype of the results, see `DtypeConversion`. Left out, they keep their own.
            slice_by_slice: call the function for each plane of its 3-D arrays, and stack what comes back.
                Plain functions only.
            contract: is called with the result; where it returns a false value, the call fails.
            grad: what to do with a torch tensor that requires grad and enters another framework:
                ``"error"``, or ``"detach"``. Inside torch the graph is kept.

        Returns:
            a function with the name, docstring, signature and type hints of ``fn``, on which
            ``input_memory_type``, ``output_memory_type``, ``execution_memory_type``, ``gpu_id``, ``device``
            and ``dtype_conversion`` can be read; or a decorator.

        Raises:
            TypeError: ``fn`` is no function, an option is unknown or of the wrong type.
            ValueError: an option has no sense; `UnknownFrameworkError` for the name of a framework.

        A call raises what the function raises. A `MemoryConversionError` from the conversion of an argument
        or a result names the function, the argument or the place in the result, and the reason.
        """
        if fn and options:
            raise TypeError(
                f"@{self.name} takes a function or options, not both: write"
                f" @{self.name}({', '.join(f'{name}=…' for name in options)}) above the function"
            )
        checked = _checked(self.name, options)
        if not fn:
            return _Configured(checked)
        function, *more = fn
        if more:
            raise TypeError(f"@{self.name} takes one function, not {len(fn)} arguments; options go by name")
        return _decorate(function, checked)


class _Keeping(Protocol):
    def __call__(self, fn: Callable[P, R], /) -> Decorated[P, R]: ...


class _Changing(Protocol):
    def __call__(self, fn: Callable[P, Any], /) -> Decorated[P, Any]: ...


class _Configured:
    """A decorator with its options."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def __repr__(self) -> str:
        return f"<arraybridge decorator {self._options.framework!r} with options>"

    def __call__(self, fn: Any, /) -> Any:
        return _decorate(fn, self._options)


# -- options -----------------------------------------------------------------------------------------

_OPTIONS = tuple(name for name in Options.__dataclass_fields__ if name != "framework")


def _checked(framework: str, given: dict[str, Any]) -> Options:
    """The options, each of the right type and in its range.

    Raises:
        TypeError: one is unknown, or of the wrong type.
        ValueError: one has a value that it cannot have.
    """
    for name in given:
        if name not in _OPTIONS:
            raise TypeError(
                f"@{framework} has no option {name!r}{nearest(name, _OPTIONS)}; it has {', '.join(_OPTIONS)}"
            )
    given = dict(given)
    for name in ("strict", "slice_by_slice"):
        if not isinstance(given.get(name, False), bool):
            raise TypeError(f"{name}={given[name]!r} must be True or False")
    for name, least in (("max_retries", 0), ("min_split", 1), ("split_axis", None)):
        value = given.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}={value!r} must be a whole number")
        if least is not None and value < least:
            raise ValueError(f"{name}={value!r} must be at least {least}")
    given["gpu_id"] = check_gpu_id(given.get("gpu_id"))
    if given.get("device") is not None:
        if given["gpu_id"] is not None:
            raise ValueError(f"pass gpu_id={given['gpu_id']!r} or device={given['device']!r}, not both")
        Device.parse(given["device"])
    if given.get("input_type") is not None:
        given["input_type"] = registry.framework_name(given["input_type"])
    elif given.get("strict"):
        raise ValueError("strict=True refuses what is not of input_type; say which, as in input_type='numpy'")
    given["output_type"] = _output_type(framework, given.get("output_type"))
    _check_choice("grad", given.get("grad", "error"), ("error", "detach"))
    if not isinstance(given.get("oom_recovery", False), bool):
        _check_choice("oom_recovery", given["oom_recovery"], ("split",), " or True or False")
    conversion = given.get("dtype_conversion", DtypeConversion.NATIVE_OUTPUT)
    if not isinstance(conversion, DtypeConversion):
        names = [member.name for member in DtypeConversion]
        hint = nearest(str(conversion), [name.lower() for name in names])
        raise TypeError(
            f"dtype_conversion={conversion!r} must be a member of DtypeConversion{hint}: {', '.join(names)}"
        )
    _check_contract(given.get("contract"))
    return Options(framework, **given)


def _check_choice(option: str, value: Any, choices: tuple[str, ...], more: str = "") -> None:
    if not isinstance(value, str):
        raise TypeError(f"{option}={value!r} must be {' or '.join(map(repr, choices))}{more}")
    if value not in choices:
        expected = " or ".join(map(repr, choices))
        raise ValueError(f"{option}={value!r} must be {expected}{more}{nearest(value, choices)}")


def _check_contract(contract: Any) -> None:
    if contract is not None and not callable(contract):
        raise TypeError(f"contract={contract!r} must be a function of the result")


def _output_type(framework: str, name: Any) -> str:
    if name is None:
        return framework
    if name == "input":
        return "input"
    try:
        return registry.framework_name(name)
    except UnknownFrameworkError as error:
        hint = nearest(name, ["input"])
        raise UnknownFrameworkError(f"{error}; output_type may also be 'input'{hint}") from None


# -- the function around the function ------------------------------------------------------------------


def _decorate(fn: Any, options: Options) -> Any:
    if isinstance(fn, (staticmethod, classmethod)):
        return type(fn)(_decorate(fn.__func__, options))
    what = f"@{options.framework}"
    _check_function(fn, what)
    kind = _kind_of_function(fn)
    if kind != "function":
        for option in ("oom_recovery", "slice_by_slice"):
            if getattr(options, option):
                raise ValueError(f"{what}({option}=…) takes plain functions, and {_label(fn)} is a {kind}")
    runner = Runner(fn, options, label=_label(fn), is_method=_is_method(fn))
    wrapper = _wrap(fn, kind, runner)
    wrapper.input_memory_type = options.input_type or options.framework
    wrapper.output_memory_type = options.output_type
    wrapper.execution_memory_type = options.framework
    wrapper.gpu_id = options.gpu_id
    wrapper.device = options.device
    wrapper.dtype_conversion = options.dtype_conversion
    return wrapper


def _check_function(fn: Any, what: str) -> None:
    if isinstance(fn, type):
        raise TypeError(f"{what} decorates functions, and {fn.__qualname__} is a class; decorate its methods")
    if isinstance(fn, (property, functools.cached_property)):
        name = type(fn).__name__
        raise TypeError(f"{what} decorates functions, and this is a {name}; put @{name} above {what}")
    if not callable(fn):
        hint = "; options go by name, as in gpu_id=0" if isinstance(fn, (int, str, Device)) else ""
        raise TypeError(f"{what} decorates functions, and {fn!r} cannot be called{hint}")


def _label(fn: Any) -> str:
    inner = fn.func if isinstance(fn, functools.partial) else fn
    return getattr(inner, "__qualname__", None) or type(inner).__qualname__


def _is_method(fn: Any) -> bool:
    """Whether the first argument will be self, which is no input even where it is an array."""
    if not inspect.isfunction(fn):
        return False  # a bound method, a partial or an object has its self already
    parameters = list(inspect.signature(fn).parameters)
    return bool(parameters) and parameters[0] in ("self", "cls")


def _kind_of_function(fn: Any) -> str:
    called = fn if inspect.isroutine(fn) or isinstance(fn, functools.partial) else type(fn).__call__
    if inspect.iscoroutinefunction(called):
        return "coroutine"
    if inspect.isasyncgenfunction(called):
        return "asynchronous generator"
    return "generator" if inspect.isgeneratorfunction(called) else "function"


def _wrap(fn: Callable[..., Any], kind: str, run: Declaration) -> Any:
    """A function of the same kind around ``fn``, which looks like it."""
    wrapper: Any = _WRAPPERS[kind](fn, run)
    functools.update_wrapper(wrapper, fn)
    if not hasattr(fn, "__name__"):  # a partial, or an object that can be called
        inner = fn.func if isinstance(fn, functools.partial) else fn
        wrapper.__name__ = getattr(inner, "__name__", type(inner).__name__)
        wrapper.__qualname__ = _label(fn)
        wrapper.__doc__ = getattr(inner, "__doc__", None)
    return wrapper


# The wrappers have no free variables but these two, so that cloudpickle can carry them by value.


def _around_function(fn: Callable[..., Any], run: Declaration) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return run(args, kwargs)

    return wrapper


def _around_coroutine(fn: Callable[..., Any], run: Declaration) -> Callable[..., Any]:
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        args, kwargs, call = run.enter(args, kwargs)
        return run.leave(await fn(*args, **kwargs), call)

    return wrapper


def _around_generator(fn: Callable[..., Any], run: Declaration) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        args, kwargs, call = run.enter(args, kwargs)
        made = fn(*args, **kwargs)
        try:
            item = next(made)
            while True:
                try:
                    sent = yield run.leave(item, call)
                except GeneratorExit:
                    raise
                except BaseException as error:  # noqa: BLE001  # whatever is thrown in is the generator's
                    item = made.throw(error)
                else:
                    item = made.send(run.bring(sent))
        except StopIteration as stop:
            return run.leave(stop.value, call)
        finally:
            made.close()

    return wrapper


def _around_asynchronous_generator(fn: Callable[..., Any], run: Declaration) -> Callable[..., Any]:
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        args, kwargs, call = run.enter(args, kwargs)
        made = fn(*args, **kwargs)
        try:
            item = await anext(made)
            while True:
                try:
                    sent = yield run.leave(item, call)
                except GeneratorExit:
                    raise
                except BaseException as error:  # noqa: BLE001  # whatever is thrown in is the generator's
                    item = await made.athrow(error)
                else:
                    item = await made.asend(run.bring(sent))
        except StopAsyncIteration:
            return
        finally:
            await made.aclose()

    return wrapper


_WRAPPERS: dict[str, Callable[[Callable[..., Any], Declaration], Callable[..., Any]]] = {
    "function": _around_function,
    "coroutine": _around_coroutine,
    "generator": _around_generator,
    "asynchronous generator": _around_asynchronous_generator,
}


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
    takes, gives = registry.framework_name(input_type), registry.framework_name(output_type)
    _check_contract(contract)

    def declare(fn: Any) -> Any:
        if isinstance(fn, (staticmethod, classmethod)):
            return type(fn)(declare(fn.__func__))
        _check_function(fn, "@memory_types")
        wrapper = _wrap(fn, _kind_of_function(fn), Declaration(fn, contract))
        wrapper.input_memory_type, wrapper.output_memory_type = takes, gives
        wrapper.execution_memory_type = takes
        return wrapper

    return declare


# -- one for each framework ----------------------------------------------------------------------------

numpy = FrameworkDecorator("numpy")
cupy = FrameworkDecorator("cupy")
torch = FrameworkDecorator("torch")
jax = FrameworkDecorator("jax")
tensorflow = FrameworkDecorator("tensorflow")
pyclesperanto = FrameworkDecorator("pyclesperanto")

_decorators = {d.name: d for d in (numpy, cupy, torch, jax, tensorflow, pyclesperanto)}


def decorator_of(name: str) -> FrameworkDecorator:
    """The decorator of a framework, that of a plugin included; always the same object.

    Raises:
        UnknownFrameworkError: there is no framework of that name.

    >>> import arraybridge
    >>> arraybridge.framework("torch").decorator is decorator_of("torch") is arraybridge.torch
    True
    """
    found = _decorators.get(name)
    return _decorators.setdefault(name, FrameworkDecorator(name)) if found is None else found


set_decorator_maker(decorator_of)
