"""Which carrier an object has, and what it carries. Asked only of what no framework owns."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from arraybridge.carriers.kinds import BUFFERS, KINDS, Carrier, refused
from arraybridge.errors import MemoryConversionError, told
from arraybridge.frameworks import hostmemory, registry
from arraybridge.frameworks.base import Framework
from arraybridge.frameworks.foreign import ForeignHost, is_foreign_array
from arraybridge.types import Cache, empty_caches

__all__ = ["carrier_of", "opened", "register_carrier"]

#: Entry-point group of other packages: ``root module of the objects' classes = "package.module:Class"``.
GROUP = "arraybridge.carriers"

_registered: list[Carrier] = []
# Type → the carriers to ask of its objects.
_by_type: Cache[type, tuple[Carrier, ...]] = Cache()


def register_carrier(carrier: Carrier) -> Carrier:
    """Make a kind of objects known, and return it; the last one that is registered is asked first.

    Raises:
        TypeError: it is no instance of a subclass of `Carrier`.
    """
    if not isinstance(carrier, Carrier):
        raise TypeError(f"register_carrier() takes an instance of a Carrier subclass, not {carrier!r}")
    _registered.insert(0, carrier)
    empty_caches()
    return carrier


def carrier_of(x: Any) -> Carrier | None:
    """What ``x`` is as an object that carries an array; None if it is none, or an array of a framework."""
    cls = type(x)
    candidates = _by_type.get(cls)
    if candidates is None:
        candidates = _by_type.keep(cls, tuple(_candidates(x, cls)))
    for carrier in candidates:
        if carrier.carries(x):
            return carrier
    return None


def _candidates(x: Any, cls: type) -> Iterator[Carrier]:
    if isinstance(x, (type, np.generic)) or registry.find_owner(x) is not None:
        return
    yield from _registered
    for root in dict.fromkeys(base.__module__.partition(".")[0] for base in cls.__mro__):
        if root in KINDS:
            yield KINDS[root]
        elif root != "builtins" and root in _entry_points():
            yield _entry_points()[root].load()()
    if not is_foreign_array(x):
        yield BUFFERS


@cache
def _entry_points() -> dict[str, Any]:
    from importlib.metadata import entry_points

    return {point.name: point for point in entry_points(group=GROUP)}


class _ToRead(ForeignHost):
    """Values that are read when they are needed, and then are nobody else's."""

    def to_host(self, x: Any) -> np.ndarray:
        values = np.asarray(x[...])
        return hostmemory.fresh(values) if isinstance(x, np.ndarray) or not values.flags.writeable else values

    host_view = copy = to_host


def opened(carrier: Carrier, x: Any) -> tuple[Framework | None, Any]:
    """The framework of what ``x`` carries, None where the array tells it; and the array to read."""
    try:
        array = carrier.array(x)
    except (MemoryConversionError, MemoryError):
        raise
    except Exception as error:  # the code of others may raise anything
        raise refused(f"an object of type {type(x).__qualname__}", f"it says: {told(error)}") from error
    if type(array) is tuple:
        return _ToRead(array[1]), array[0]
    if array is x:
        raise TypeError(f"{type(carrier).__name__}.array() gave back the object itself")
    return None, array
