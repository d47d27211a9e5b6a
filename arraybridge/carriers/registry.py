"""The registry of `Carrier` instances, which finds the one that handles an object.

Carriers are queried only for objects that no framework owns. Their packages are not imported: if an object of
a package exists, the package is already loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from arraybridge.caches import empty_caches, new_cache, recall, remember
from arraybridge.carriers.carrier import Carrier
from arraybridge.carriers.third_party_arrays import is_protocol_producer
from arraybridge.compilers import run_eagerly
from arraybridge.errors import error_text, warn
from arraybridge.interface import registry
from arraybridge.interface.installation import packages_of
from arraybridge.interface.registry import not_an_instance_error

__all__ = ["carrier_of", "register_carrier"]

#: The entry-point group for carriers of other packages. The name of an entry point is the top-level module of
#: the objects, and its value is the subclass of `Carrier`, as ``"package.module:Class"``.
GROUP = "arraybridge.carriers"

_registered: list[Carrier] = []
# Type of an object → the carriers that may handle it.
_by_type: dict[type, tuple[Carrier, ...]] = new_cache()


@run_eagerly
def register_carrier(carrier: Carrier) -> Carrier:
    """Register a carrier. The carrier that was registered last has priority.

    Args:
        carrier: An instance of a subclass of `Carrier`.

    Returns:
        The same instance.

    Raises:
        TypeError: If ``carrier`` is not such an instance.

    Example:
        >>> import numpy as np, arraybridge
        >>> class Photo:  # a class of another library
        ...     def __init__(self, pixels, place):
        ...         self.pixels, self.place = pixels, place
        >>> class Photos(Carrier):
        ...     def carries(self, x):
        ...         return isinstance(x, Photo)
        ...     def array(self, x):
        ...         return x.pixels
        ...     def rebuild(self, x, array):
        ...         return Photo(array, x.place)
        >>> _ = register_carrier(Photos())
        >>> arraybridge.to_torch(Photo(np.zeros(2), "Basel"))
        tensor([0., 0.], dtype=torch.float64)
    """
    if not isinstance(carrier, Carrier):
        raise not_an_instance_error("register_carrier", carrier, Carrier)
    _registered.insert(0, carrier)
    empty_caches()
    return carrier


def carrier_of(x: Any) -> Carrier | None:
    """Return the `Carrier` that handles an object; None if there is none or a framework owns the object."""
    cls = type(x)
    try:
        candidates = _by_type[cls]
    except (KeyError, TypeError):  # not cached yet, or unhashable
        candidates = None
    if candidates is None:
        candidates = remember(_by_type, cls, tuple(_candidates(x, cls)))
    for carrier in candidates:
        try:
            if carrier.carries(x):
                return carrier
        except (RecursionError, MemoryError):
            raise
        except Exception:  # noqa: BLE001, S110  # the object or a third-party carrier may raise anything
            pass
    return None


def _candidates(x: Any, cls: type) -> Iterator[Carrier]:
    if issubclass(cls, (type, np.generic)) or registry.find_owner(x) is not None:
        return
    yield from _registered
    for root in packages_of(cls):
        if root in _BUILT_IN:
            yield _built_in_carrier(*_BUILT_IN[root])
        elif root != "builtins" and root in _entry_points():
            yield from _load_entry_point(root)
    if not is_protocol_producer(x) and _is_buffer(x):
        yield _built_in_carrier("buffers", "Buffers")


@cache
def _load_entry_point(root: str) -> tuple[Carrier, ...]:
    """Return the carrier from an entry point; warn and return no carrier if it cannot be loaded."""
    point = _entry_points()[root]
    try:
        return (point.load()(),)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # third-party code may raise anything
        warn(
            f"The entry point {root} = {point.value} in the group {GROUP} cannot be loaded:"
            f" {error_text(error)}.",
            RuntimeWarning,
        )
        return ()


def why_not_recognized(x: Any) -> Exception | None:
    """Return the error that kept ``x`` from being recognized as a carrier, or None if there was none."""
    for carrier in recall(_by_type, type(x)) or ():
        try:
            carrier.carries(x)
        except Exception as error:  # noqa: BLE001  # becomes the cause of another error
            return error
    return None


def _is_buffer(x: Any) -> bool:
    """Return whether the class of ``x`` supports the buffer protocol.

    `carrier_of` caches the answer per class, so it must not depend on the state of ``x``.
    """
    try:
        memoryview(x).release()
    except TypeError:
        return False
    except Exception:  # noqa: BLE001  # a closed buffer, or a class whose __buffer__ raises anything
        return True  # other objects of its class may be open
    return True


@cache
def _entry_points() -> dict[str, Any]:
    from importlib.metadata import entry_points

    return {point.name: point for point in entry_points(group=GROUP)}


#: Package of the objects → the module of `arraybridge.carriers` and the class of the built-in carrier.
_BUILT_IN = {
    "xarray": ("labeled", "Xarray"),
    "SimpleITK": ("images", "SimpleItk"),
    "PIL": ("images", "Pillow"),
    "zarr": ("files", "Files"),
    "h5py": ("files", "Files"),
    "blosc2": ("files", "Files"),
    "pandas": ("tables", "Pandas"),
    "polars": ("tables", "Polars"),
    "pyarrow": ("arrow", "Arrow"),
    "pint": ("units", "Pint"),
    "keras": ("variables", "Variables"),
    "flax": ("variables", "Variables"),
}


@cache
def _built_in_carrier(module: str, cls: str) -> Carrier:
    """Import and return a built-in carrier."""
    carrier: Carrier = getattr(import_module(f"arraybridge.carriers.{module}"), cls)()
    return carrier
