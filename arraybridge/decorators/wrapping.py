"""A function around a function: of its kind, with its name, docstring and signature. For all decorators."""

from __future__ import annotations

import functools
import inspect
import linecache
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from arraybridge.types import Device, GpuId

if TYPE_CHECKING:
    from arraybridge.decorators.dtype_conversion import DtypeConversion

__all__ = ["Decorated", "P", "R", "decorate", "kind_of_function", "label_of", "name_of", "takes_self", "wrap"]

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Decorated(Protocol[P, R_co]):
    """What a decorator makes of a function, to a type checker.

    The first form of the call keeps the function's own signature for editors; the second accepts whatever a
    caller holds, since arrays of every framework are welcome.
    """

    gpu_id: GpuId
    # Of the decorators of frameworks.
    input_memory_type: str
    output_memory_type: str
    execution_memory_type: str
    device: Device | None
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


def decorate(fn: Any, what: str, make: Callable[[Any], Any]) -> Any:
    """``make(fn)``, inside of a static or class method where it is one; ``what``: the decorator as written.

    Raises:
        TypeError: ``fn`` is no function.
    """
    if isinstance(fn, (staticmethod, classmethod)):
        return type(fn)(decorate(fn.__func__, what, make))
    if isinstance(fn, type) or not callable(fn):
        raise TypeError(
            f"{what} decorates functions, and {fn!r} is none: decorate the methods of a class, put @property"
            f" above {what}, and pass options by name, as in gpu_id=0"
        )
    return make(fn)


# -- what a function is --------------------------------------------------------------------------------


def _inner(fn: Any) -> Any:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn


def name_of(fn: Any) -> str:
    """The name of a function, of a partial's too, or of an object's class."""
    return label_of(fn).rpartition(".")[2]


def label_of(fn: Any) -> str:
    """The name with that of the class around it: ``"Model.predict"``."""
    inner = _inner(fn)
    return str(getattr(inner, "__qualname__", None) or type(inner).__qualname__)


def takes_self(fn: Any) -> bool:
    """Whether the first argument will be self or cls: only for functions that are defined in a class body."""
    if not inspect.isfunction(fn):
        return False  # a bound method, a partial or an object has its self already
    # The scope is "" in a module, "f.<locals>" in a function, "<dictcomp>" in a comprehension (Python 3.11).
    scope = fn.__qualname__.rpartition(".")[0].rpartition(".")[2]
    return scope.isidentifier() and not _is_static(fn)


def _is_static(fn: Any) -> bool:
    """Whether ``@staticmethod`` stands above the function; a decorator below it sees a plain function."""
    code = getattr(inspect.unwrap(fn), "__code__", fn.__code__)
    for line in linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]:
        if not line.lstrip().startswith("@"):
            return False
        if line.split("#")[0].strip() == "@staticmethod":
            return True
    return False


def kind_of_function(fn: Any) -> str:
    """``"function"``, ``"coroutine"`` or ``"generator"``, which may be asynchronous."""
    called = fn if inspect.isroutine(fn) or isinstance(fn, functools.partial) else type(fn).__call__
    if inspect.iscoroutinefunction(called):
        return "coroutine"
    yields = inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called)
    return "generator" if yields else "function"


# -- the function around it ----------------------------------------------------------------------------


def wrap(fn: Callable[..., Any], run: Any) -> Any:
    """A function that looks like ``fn``, and calls ``run(args, kwargs)``.

    Around a coroutine function it is one too, and awaits ``run.awaited(args, kwargs)``.

    Raises:
        ValueError: ``fn`` is a generator.
    """
    kind = kind_of_function(fn)
    if kind == "generator":
        raise ValueError(
            f"decorators take functions that return, and {label_of(fn)} is a {kind}; decorate the function"
            " that makes one item, and call it in the generator"
        )

    # Each has one free variable, an object, so that cloudpickle can carry it by value. That is no function:
    # dill, with recurse=True, would go through all that its module knows.
    def called(*args: Any, **kwargs: Any) -> Any:
        return run.__call__(args, kwargs)  # a call of the object itself takes longer

    async def awaited(*args: Any, **kwargs: Any) -> Any:
        return await run.awaited(args, kwargs)

    wrapper: Any = awaited if kind == "coroutine" else called
    functools.update_wrapper(wrapper, fn, updated=())
    # What begins with an underscore is not the user's: torch.compile would run the function that it finds so.
    vars(wrapper).update({name: x for name, x in getattr(fn, "__dict__", {}).items() if name[0] != "_"})
    if not hasattr(fn, "__name__"):  # a partial, or an object that can be called
        wrapper.__name__ = name_of(fn)
        wrapper.__qualname__ = label_of(fn)
        wrapper.__doc__ = getattr(_inner(fn), "__doc__", None)
    return wrapper
