"""Wrappers that preserve the kind, name, docstring and signature of the decorated function."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from arraybridge.caches import remember
from arraybridge.compilers import exempt, find_untraced_call
from arraybridge.decorators.coroutines import await_in_steps
from arraybridge.device import Device
from arraybridge.types import GpuId

if TYPE_CHECKING:
    from arraybridge.decorators.dtype_conversion import DtypeConversion

__all__ = [
    "Decorated",
    "P",
    "R",
    "SelfArgument",
    "decorate",
    "kind_of_function",
    "label_of",
    "name_of",
    "wrap",
]

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Decorated(Protocol[P, R_co]):
    """A decorated function, for type checkers.

    The first overload of the call keeps the signature of the function for editors. The second overload
    accepts arrays of any framework.
    """

    gpu_id: GpuId
    # The framework decorators set these attributes; `gpu` does not.
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

    # Attribute access binds self.
    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Decorated[P, R_co]: ...
    @overload
    def __get__(
        self: Decorated[Concatenate[Any, Q], R_co], instance: object, owner: type | None = None
    ) -> Decorated[Q, R_co]: ...


@exempt
def decorate(fn: Any = inspect.Parameter.empty, *, what: str, make: Callable[[Any], Any]) -> Any:
    """Return ``make(fn)``; for a static or class method, a static or class method of the decorated function.

    Args:
        fn: The object to decorate. Empty if a decorator with options was called without a function.
        what: The decorator as users write it, such as ``"@torch"``.
        make: Wraps a function.

    Raises:
        TypeError: If ``fn`` is not a function.
    """
    if isinstance(fn, (staticmethod, classmethod)):
        return type(fn)(decorate(fn.__func__, what=what, make=make))
    if isinstance(fn, type) or not callable(fn):
        got = type(fn).__name__
        if fn is inspect.Parameter.empty:
            got = "nothing"
            fix = f"Write {what} or {what}(...) above a function."
        elif isinstance(fn, type):
            fix = "Decorate the methods of the class."
        elif isinstance(fn, property):
            fix = f"Put @property above {what}."
        else:
            fix = "Write the decorator above a function, and pass its options by keyword."
        raise TypeError(f"{what} expected a function, got {got}. {fix}")
    return make(fn)


# -- properties of functions ---------------------------------------------------------------------------


def _inner(fn: Any) -> Any:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn


def name_of(fn: Any) -> str:
    """Return the name of a function, of the function in a partial, or of the class of a callable object."""
    return label_of(fn).rpartition(".")[2]


def label_of(fn: Any) -> str:
    """Return the qualified name of a function, such as ``"Model.predict"``."""
    inner = _inner(fn)
    return str(getattr(inner, "__qualname__", None) or type(inner).__qualname__)


class SelfArgument:
    """A rule that recognizes ``self`` or ``cls`` in calls to a function defined in a class body.

    The first argument is ``self`` if it is an instance of that class, and ``cls`` if it is that class.
    Subclasses count too. The first argument of a static method is neither. Calls check whether the
    method is static, because ``@staticmethod`` is applied after the decorators below it. The result is cached
    for each class.
    """

    __slots__ = ("_known", "class_name", "function", "module", "name")

    def __init__(self, fn: Any, class_name: str) -> None:
        self.function = inspect.unwrap(fn)
        #: The name of the first parameter, which callers may pass by keyword; "" if it is unknown.
        self.name = ""
        with suppress(TypeError, ValueError):  # a function written in C may have no signature
            self.name = next(iter(inspect.signature(self.function).parameters), "")
        self.module = fn.__module__
        self.class_name = class_name
        self._known: dict[type, bool] = {}

    @classmethod
    def of(cls, fn: Any) -> SelfArgument | None:
        """Return the rule for a function, or None if it is not defined in a class body."""
        if not inspect.isfunction(fn):
            return None  # bound methods, partials and callable objects already have their `self`
        class_name = fn.__qualname__.rpartition(".")[0]
        # The scope is "" in a module, "f.<locals>" in a function, and "<dictcomp>" in a dict comprehension
        # (Python 3.11).
        is_method = class_name.rpartition(".")[2].isidentifier()
        return cls(fn, class_name) if is_method else None

    def count(self, args: Sequence[Any]) -> int:
        """Return 1 if the first positional argument is ``self`` or ``cls``, otherwise 0."""
        if not args:
            return 0
        first = args[0]
        if issubclass(type(first), type):  # not isinstance, because `__class__` of an object may raise
            return int(self._is_method_of(first) or self._is_method_of(type(first)))
        cls = type(first)
        if type(cls).__hash__ is None:
            return int(self._is_method_of(cls))
        known = self._known.get(cls)
        return int(remember(self._known, cls, self._is_method_of(cls)) if known is None else known)

    def by_position(self, kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call by keyword, with ``self`` or ``cls`` as a positional argument."""
        if self.name not in kwargs or not self.count([kwargs[self.name]]):
            return (), kwargs
        others = {name: value for name, value in kwargs.items() if name != self.name}
        return (kwargs[self.name],), others

    def _is_method_of(self, cls: type) -> bool:
        """Return whether the function is a method of a class or of one of its bases, and is not static."""
        for base in cls.__mro__:
            for attribute in vars(base).values():
                if self._is_function(attribute):
                    return not isinstance(attribute, staticmethod)
        # The function may be called by another attribute of the class, such as a property. The class is then
        # recognized by its name.
        names = [(base.__module__, base.__qualname__) for base in cls.__mro__]
        return (self.module, self.class_name) in names

    def _is_function(self, attribute: Any) -> bool:
        inner = attribute.__func__ if type(attribute) in (staticmethod, classmethod) else attribute
        return inspect.isfunction(inner) and inspect.unwrap(inner) is self.function


def kind_of_function(fn: Any) -> str:
    """Return ``"function"``, ``"coroutine"`` or ``"generator"`` (for asynchronous generators as well)."""
    called = fn if inspect.isroutine(fn) or isinstance(fn, functools.partial) else type(fn).__call__
    if inspect.iscoroutinefunction(called):
        return "coroutine"
    yields = inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called)
    return "generator" if yields else "function"


# -- the wrapper ---------------------------------------------------------------------------------------


def wrap(fn: Callable[..., Any], run: Any, *, rewritable: bool = False) -> Any:
    """Return a function that looks like ``fn`` and calls ``run(args, kwargs)``.

    For a coroutine function, return a coroutine function that awaits ``run.await_call(args, kwargs)``. If
    ``self`` or ``cls`` is passed by keyword, it is the first of ``args``.

    Args:
        fn: The function to wrap.
        run: The callable object that the wrapper calls, with the attribute ``self_argument``.
        rewritable: Whether AutoGraph may rewrite the wrapper, and therefore ``fn``.

    Raises:
        ValueError: If ``fn`` is a generator function.
    """
    kind = kind_of_function(fn)
    if kind == "generator":
        raise ValueError(
            f"{label_of(fn)} is a {kind}, but decorators need a function that returns. Decorate the function"
            " that computes one item, and call it in the generator."
        )

    # The only free variable is an object, so that cloudpickle can serialize the wrapper by value. The object
    # is not a function, because dill with recurse=True would serialize the globals of its module.
    def call_function(*args: Any, **kwargs: Any) -> Any:
        try:
            return run.__call__(args, kwargs)  # faster than run(args, kwargs)
        finally:
            pass  # it costs nothing, and keeps torch.compile from tracing this function; see `run_eagerly`

    def call_method(*args: Any, **kwargs: Any) -> Any:
        try:
            if not args:
                args, kwargs = run.self_argument.by_position(kwargs)
            return run.__call__(args, kwargs)
        finally:
            pass  # as in `call_function`

    async def await_function(*args: Any, **kwargs: Any) -> Any:
        if not args and run.self_argument is not None:
            args, kwargs = run.self_argument.by_position(kwargs)
        if "torch._dynamo" in sys.modules:
            try:
                call = find_untraced_call()
            finally:
                pass
            if call is not None:
                return await await_in_steps(call, run.await_call, (args, kwargs), {})
        return await run.await_call(args, kwargs)

    wrapper: Any = call_function if run.self_argument is None else call_method
    if kind == "coroutine":
        wrapper = await_function
    functools.update_wrapper(wrapper, fn, updated=())
    # Attributes with a leading underscore are not copied, because libraries set them: torch.compile would run
    # the function in `_torchdynamo_inline` instead of the wrapper (torch 2.13, torch/_dynamo/utils.py).
    vars(wrapper).update({name: x for name, x in getattr(fn, "__dict__", {}).items() if name[0] != "_"})
    if not hasattr(fn, "__name__"):  # a partial or a callable object
        wrapper.__name__ = name_of(fn)
        wrapper.__qualname__ = label_of(fn)
        wrapper.__doc__ = getattr(_inner(fn), "__doc__", None)
    exempt(wrapper)
    # AutoGraph cannot rewrite the wrapper of a lambda, because it looks for the source of a lambda.
    if rewritable and wrapper.__name__ != "<lambda>":
        del wrapper.autograph_info__
    return wrapper
