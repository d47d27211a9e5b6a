"""What lies inside of objects that are no containers: generators, closures, instances of any class."""

from __future__ import annotations

import dis
import gc
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

__all__ = ["found_within"]

#: How many objects are looked at; a model with its layers has more, and is no place to hide one tensor.
_MOST = 200
_NOTHING_IN = (int, float, complex, str, bytes, type(None), type, ModuleType, CodeType)


def found_within(roots: Iterable[Any], is_it: Callable[[Any], bool]) -> Any:
    """The first object of its kind that is one of the roots or held by them, in few steps; or None.

    Of a function that is what it captures: its closure, its defaults, and the globals that it names.
    """
    seen: dict[int, Any] = {}  # which holds them, so that no other object gets their numbers
    todo = list(roots)
    for x in todo:
        if isinstance(x, _NOTHING_IN) or id(x) in seen:
            continue
        if len(seen) == _MOST:
            return None
        seen[id(x)] = x
        if is_it(x):
            return x
        if isinstance(x, FunctionType):
            todo += _captured_by(x)
        elif gc.is_tracked(x):
            todo += gc.get_referents(x)
    return None


def _captured_by(function: FunctionType) -> Iterator[Any]:
    yield from (function.__defaults__, function.__kwdefaults__, function.__dict__)
    yield from function.__closure__ or ()
    known = function.__globals__
    yield from (known[name] for name in _globals_named_in(function.__code__) if name in known)


@lru_cache(maxsize=1024)
def _globals_named_in(code: CodeType) -> tuple[str, ...]:
    found = [i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"]
    for inner in code.co_consts:
        found += _globals_named_in(inner) if isinstance(inner, CodeType) else ()
    return tuple(dict.fromkeys(found))
