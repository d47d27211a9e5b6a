"""What a carrier is, and which one an object has. Asked only of what no framework owns."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np

from arraybridge.errors import ArrayNotSupportedError, MemoryConversionError, told
from arraybridge.frameworks import hostmemory, registry
from arraybridge.frameworks.base import Framework
from arraybridge.frameworks.foreign import ForeignHost, is_foreign_array
from arraybridge.types import Cache, empty_caches

__all__ = ["Carrier", "carrier_of", "opened", "register_carrier"]

#: Entry-point group of other packages: ``root module of the objects' classes = "package.module:Class"``.
GROUP = "arraybridge.carriers"

# Root module of an object's class → the module here and the class in it.
_MODULES = {
    "xarray": ("labelled", "Xarray"),
    "SimpleITK": ("images", "SimpleItk"),
    "PIL": ("images", "Pillow"),
    "zarr": ("files", "Files"),
    "h5py": ("files", "Files"),
    "pandas": ("labelled", "Pandas"),
    "polars": ("labelled", "Polars"),
}
_registered: list[Carrier] = []
# Type → the carriers to ask of its objects.
_by_type: Cache[type, tuple[Carrier, ...]] = Cache()


class Carrier:
    """A kind of objects that carry one array; `register_carrier` makes it known.

    >>> import numpy as np, arraybridge
    >>> class Scan:  # somebody's class
    ...     def __init__(self, pixels, patient):
    ...         self.pixels, self.patient = pixels, patient
    >>> class Scans(arraybridge.Carrier):
    ...     def carries(self, x):
    ...         return type(x).__name__ == "Scan"
    ...     def array(self, x):
    ...         return x.pixels
    ...     def rebuild(self, x, array):
    ...         return type(x)(array, x.patient)
    >>> _ = arraybridge.register_carrier(Scans())
    >>> @arraybridge.torch(output_type="input")
    ... def double(x):
    ...     return x * 2  # a tensor here
    >>> double(Scan(np.ones(2), "Ada")).patient
    'Ada'
    """

    def carries(self, x: Any) -> bool:
        """Whether ``x`` is such an object. Asked of whatever no framework owns; False leaves it alone."""
        raise NotImplementedError

    def array(self, x: Any) -> Any:
        """The array that ``x`` carries, of any framework, where it can show memory that it keeps alive.

        Else a pair: what is to be read later (a NumPy array, or an object with ``shape``, ``dtype``,
        ``nbytes`` and slices, as a file has), and why, in words that follow "because".
        """
        raise NotImplementedError

    def rebuild(self, x: Any, array: Any) -> Any:
        """An object like ``x`` around another array of that shape, in the framework of the one it carries.

        The array itself where there can be no such object, as for files, or for another dtype.
        """
        return array


class Unread:
    """Values that are made when somebody reads them."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, read: Callable[[], np.ndarray]) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.nbytes = math.prod(shape) * self.dtype.itemsize
        self._read = read

    def __getitem__(self, key: Any) -> Any:
        return self._read()[key]


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
        if root in _MODULES and root in sys.modules:
            yield _made(*_MODULES[root])
        elif root != "builtins" and root in _entry_points():
            yield _entry_points()[root].load()()
    if not is_foreign_array(x) and _is_buffer(x):
        yield _made("carrier", "Buffers")


@cache
def _made(module: str, name: str) -> Carrier:
    carrier: Carrier = getattr(importlib.import_module(f"arraybridge.carriers.{module}"), name)()
    return carrier


@cache
def _entry_points() -> dict[str, Any]:
    from importlib.metadata import entry_points

    return {point.name: point for point in entry_points(group=GROUP)}


def _is_buffer(x: Any) -> bool:
    try:
        memoryview(x).release()
    except TypeError:
        return False
    except (ValueError, BufferError):
        pass  # one that is closed: others of its class are not
    return True


class Buffers(Carrier):
    """Whatever has the buffer protocol: memoryview, array.array, mmap, bytes."""

    _NUMBERS = frozenset("?bBhHiIlLqQnNefdg")

    def carries(self, x: Any) -> bool:
        try:
            view = memoryview(x)
        except (TypeError, ValueError, BufferError):
            return False
        return view.ndim > 0 and view.format.lstrip("@=<>!").removeprefix("Z") in self._NUMBERS

    def array(self, x: Any) -> Any:
        return np.asarray(memoryview(x))


def is_of(x: Any, package: str, *names: str) -> bool:
    """Whether ``x`` is of one of these classes of a package; imports none."""
    module = sys.modules.get(package)
    return module is not None and isinstance(x, tuple(getattr(module, name) for name in names))


def refused(what: str, instead: str) -> ArrayNotSupportedError:
    """The error for what carries no array that can be converted exactly."""
    return ArrayNotSupportedError(f"{what} cannot be converted; {instead}", reason=what)


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
