"""What lies where no container is: in the closure of a function, in an object, in a generator."""

from __future__ import annotations

import dis
import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from itertools import islice
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

__all__ = ["captured_by", "found_within"]

#: How many objects are looked at, those nearest first; a model with its layers has more.
_MOST = 200
_NOTHING_IN = (int, float, complex, str, bytes, bytearray, type(None), type, ModuleType, CodeType)
_CACHED = type(lru_cache(len))
_SEVERAL = (list, tuple, set, frozenset, deque)


def found_within(roots: Iterable[Any], is_it: Callable[[Any], bool]) -> Any:
    """The first object of its kind that is one of the roots or held by them, in few steps; or None."""
    return _found(list(roots), is_it, gc.get_referents)


def captured_by(function: Any, is_it: Callable[[Any], bool]) -> Any:
    """The first object of its kind that a function captures, or that those do which it names; or None.

    That is what stands in its closure, its defaults, the arguments of a `functools.partial` and the globals
    that it names, and in containers there. What objects have as attributes does not count: an object with
    a history of its results, or ``self``, is no sign that a function reads it.
    """
    return _found([function, *_methods_called(function)], is_it, lambda _: ())


def _methods_called(function: Any) -> Iterator[Any]:
    """What runs where an object is called: of a module, its ``forward``."""
    if not isinstance(function, FunctionType):
        for name in ("__call__", "forward"):
            yield getattr(type(function), name, None)


def _found(todo: list[Any], is_it: Callable[[Any], bool], parts: Callable[[Any], Iterable[Any]]) -> Any:
    seen: dict[int, Any] = {}  # which holds them, so that no other object gets their numbers
    for looked, x in enumerate(todo):  # the list grows meanwhile
        if looked == _MOST:
            break
        cls = type(x)  # `isinstance` would ask a weak proxy for its class
        if issubclass(cls, _NOTHING_IN) or id(x) in seen:
            continue
        seen[id(x)] = x
        if is_it(x):
            return x
        todo += islice(_held_by(x, cls, parts), _MOST)
    return None


def _held_by(x: Any, cls: type, parts: Callable[[Any], Iterable[Any]]) -> Iterable[Any]:
    if issubclass(cls, FunctionType):
        return _of_function(x)
    if issubclass(cls, dict):
        return tuple(islice(dict.values(x), _MOST))
    for several in _SEVERAL:
        if issubclass(cls, several):
            return tuple(islice(several.__iter__(x), _MOST))  # not by a method of the user's own
    if issubclass(cls, partial):
        return (x.func, x.args, x.keywords)
    if cls is _CACHED:
        return (x.__wrapped__,)
    if cls is MethodType:
        return (x.__func__, *parts(x))
    if cls is CellType:
        return _content(x)
    return parts(x) if gc.is_tracked(x) else ()


def _of_function(function: FunctionType) -> Iterator[Any]:
    yield from function.__closure__ or ()
    yield from (function.__defaults__, function.__kwdefaults__, function.__dict__)
    known = function.__globals__
    yield from (known[name] for name in _globals_named_in(function.__code__) if name in known)


def _content(cell: CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # empty as yet
        return ()


@lru_cache(maxsize=1024)
def _globals_named_in(code: CodeType) -> tuple[str, ...]:
    found = [i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"]
    for inner in code.co_consts:
        found += _globals_named_in(inner) if isinstance(inner, CodeType) else ()
    return tuple(dict.fromkeys(found))
