"""A function around a function: of its kind, with its name, docstring and signature. For all decorators."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Protocol

from arraybridge.types import Device

__all__ = ["FunctionRun", "Run", "decorate", "kind_of_function", "label_of", "name_of", "takes_self", "wrap"]


class FunctionRun(Protocol):
    """What a wrapper calls instead of the function."""

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


class Run(FunctionRun, Protocol):
    """The same for functions that are not done when their call returns: arguments in, values to and fro."""

    def enter(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """The arguments for the function, and what `leave` has to know of them."""
        raise NotImplementedError

    def bring(self, value: Any) -> Any:
        """A value that is sent into a generator."""

    def leave(self, result: Any, call: Any) -> Any:
        """A value that the function has returned or yielded, for the caller."""

    def done(self, call: Any, error: BaseException | None = None) -> None:
        """The function has come to its end."""


def decorate(fn: Any, what: str, make: Callable[[Any], Any]) -> Any:
    """``make(fn)``, inside of a static or class method where it is one.

    Args:
        fn: what was decorated.
        what: the decorator as it is written, for messages.
        make: returns the function to be called instead.

    Raises:
        TypeError: ``fn`` is no function.
    """
    if isinstance(fn, (staticmethod, classmethod)):
        return type(fn)(decorate(fn.__func__, what, make))
    if isinstance(fn, type):
        raise TypeError(f"{what} decorates functions, and {fn.__qualname__} is a class; decorate its methods")
    if isinstance(fn, (property, functools.cached_property)):
        name = type(fn).__name__
        raise TypeError(f"{what} decorates functions, and this is a {name}; put @{name} above {what}")
    if not callable(fn):
        hint = "; options go by name, as in gpu_id=0" if isinstance(fn, (int, str, Device)) else ""
        raise TypeError(f"{what} decorates functions, and {fn!r} cannot be called{hint}")
    return make(fn)


# -- what a function is --------------------------------------------------------------------------------


def _inner(fn: Any) -> Any:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn


def name_of(fn: Any) -> str:
    """The name of a function, of a partial's too, or of an object's class."""
    inner = _inner(fn)
    return str(getattr(inner, "__name__", None) or type(inner).__name__)


def label_of(fn: Any) -> str:
    """The name with that of the class around it: ``"Model.predict"``."""
    inner = _inner(fn)
    return str(getattr(inner, "__qualname__", None) or type(inner).__qualname__)


def takes_self(fn: Any) -> bool:
    """Whether the first argument will be self, which is no input even where it is an array."""
    if not inspect.isfunction(fn):
        return False  # a bound method, a partial or an object has its self already
    parameters = list(inspect.signature(fn).parameters)
    return bool(parameters) and parameters[0] in ("self", "cls")


def kind_of_function(fn: Any) -> str:
    """``"function"``, ``"coroutine"``, ``"generator"`` or ``"asynchronous generator"``."""
    called = fn if inspect.isroutine(fn) or isinstance(fn, functools.partial) else type(fn).__call__
    if inspect.iscoroutinefunction(called):
        return "coroutine"
    if inspect.isasyncgenfunction(called):
        return "asynchronous generator"
    return "generator" if inspect.isgeneratorfunction(called) else "function"


# -- the function around it ----------------------------------------------------------------------------


def wrap(fn: Callable[..., Any], run: Any) -> Any:
    """A function of the same kind as ``fn``, which looks like it, and calls ``run``.

    ``run`` is a `FunctionRun` for a plain function and a `Run` for the other kinds.
    """
    wrapper: Any = _WRAPPERS[kind_of_function(fn)](fn, run)
    functools.update_wrapper(wrapper, fn)
    if not hasattr(fn, "__name__"):  # a partial, or an object that can be called
        wrapper.__name__ = name_of(fn)
        wrapper.__qualname__ = label_of(fn)
        wrapper.__doc__ = getattr(_inner(fn), "__doc__", None)
    return wrapper


# The wrappers have no free variables but these two, or a method of theirs, so that cloudpickle can carry them
# by value.


def _around_function(fn: Callable[..., Any], run: FunctionRun) -> Callable[..., Any]:
    called = run.__call__  # a call of the object itself would look for it each time

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return called(args, kwargs)

    return wrapper


def _around_coroutine(fn: Callable[..., Any], run: Run) -> Callable[..., Any]:
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        args, kwargs, call = run.enter(args, kwargs)
        try:
            return run.leave(await fn(*args, **kwargs), call)
        finally:
            run.done(call)

    return wrapper


def _around_generator(fn: Callable[..., Any], run: Run) -> Callable[..., Any]:
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
            run.done(call)

    return wrapper


def _around_asynchronous_generator(fn: Callable[..., Any], run: Run) -> Callable[..., Any]:
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
            run.done(call)

    return wrapper


_WRAPPERS: dict[str, Callable[[Callable[..., Any], Any], Callable[..., Any]]] = {
    "function": _around_function,
    "coroutine": _around_coroutine,
    "generator": _around_generator,
    "asynchronous generator": _around_asynchronous_generator,
}
