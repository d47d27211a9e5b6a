"""Caches that are emptied when a framework is added or removed."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, TypeVar

import numpy as np

K = TypeVar("K")
V = TypeVar("V")
#: The maximum number of entries in a cache. A program that creates classes in a loop would otherwise exhaust
#: the memory.
MOST_ENTRIES = 512
_caches: list[dict[Any, Any]] = []


def new_cache() -> dict[Any, Any]:
    """Return a dict for cached results. It is emptied whenever the known frameworks or carriers change.

    It is a plain dict, because lookups in a subclass of dict are slower.

    >>> sizes: dict[type, int] = new_cache()
    >>> remember(sizes, float, 8), sizes
    (8, {<class 'float'>: 8})
    """
    _caches.append({})
    return _caches[-1]


def recall(cache: dict[K, V], key: K) -> V | None:
    """Return the value that a cache has stored; None if it has none, or the key is unhashable."""
    try:
        return cache.get(key)
    except TypeError:
        return None


def remember(cache: dict[K, V], key: K, value: V, most: int = MOST_ENTRIES) -> V:
    """Store a value in a cache, which is emptied first if it has ``most`` entries, and return the value.

    Nothing is stored for an unhashable key: a class whose metaclass defines ``__eq__`` but not ``__hash__``.
    """
    if len(cache) >= most:
        cache.clear()
    with suppress(TypeError):
        cache[key] = value
    return value


def empty_caches() -> None:
    """Empty all caches that `new_cache` returned."""
    for cache in _caches:
        cache.clear()


def exact_key(value: Any) -> Any:
    """Return a cache key that differs for 0.0 and -0.0 and for 1, 1.0 and True, and is equal for two NaNs."""
    if issubclass(type(value), np.generic):
        return type(value), value.dtype.str, value.tobytes()
    if issubclass(type(value), float):
        return type(value), np.float64(value).tobytes()
    if issubclass(type(value), complex):
        return type(value), np.complex128(value).tobytes()
    return type(value), value
