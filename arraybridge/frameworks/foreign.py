"""Arrays of libraries that arraybridge does not know, through the protocols that they offer."""

from __future__ import annotations

from typing import Any

import numpy as np

from arraybridge.errors import UnknownArrayError, told
from arraybridge.frameworks import hostmemory, registry
from arraybridge.frameworks.advice import advice_for
from arraybridge.frameworks.base import CPU, Framework, refusals, refuse
from arraybridge.frameworks.numpy import NumpyFramework

__all__ = ["foreign_framework", "is_foreign_array", "is_on_card", "offers_alone", "unknown_array"]

_PROTOCOLS = ("__dlpack__", "__array_interface__", "__cuda_array_interface__")
_NO_NUMBERS = (np.flexible, np.datetime64, np.timedelta64, np.object_)

# DLPack device types: kDLCPU, kDLCUDAHost (pinned), kDLROCMHost can be read by the processor.
_HOST_TYPES = (1, 3, 11)
_CUDA_TYPES = (2, 13)


#: Host memory of other libraries, once it was opened as a NumPy array.
FOREIGN_HOST = NumpyFramework()
_SCALAR = NumpyFramework("a scalar of NumPy is a value, with no memory to share")


def is_foreign_array(x: Any) -> bool:
    """Whether ``x`` offers one of the array protocols; of NumPy's scalars, those that are numbers do."""
    if issubclass(type(x), (type, *_NO_NUMBERS)):
        return False
    return any(offers(x, protocol) for protocol in _PROTOCOLS)


def offers(x: Any, protocol: str) -> bool:
    """Whether the class of ``x`` has the attribute, or the object itself does; asks no ``__getattr__``."""
    try:
        return hasattr(type(x), protocol) or protocol in getattr(x, "__dict__", ())
    except (RecursionError, MemoryError):
        raise
    except Exception:  # noqa: BLE001  # of the object's own attributes
        return False


def offers_alone(x: Any) -> bool:
    """Whether ``x`` offers an array protocol that others of its class may lack."""
    return any(offers(x, protocol) and not hasattr(type(x), protocol) for protocol in _PROTOCOLS)


def is_on_card(x: Any) -> bool:
    """Whether the memory of a foreign array is CUDA's."""
    kind = _dlpack_kind(x)
    if kind is not None:
        return kind in _CUDA_TYPES
    return offers(x, "__cuda_array_interface__") and not offers(x, "__array_interface__")


def _dlpack_kind(x: Any) -> int | None:
    """DLPack's number for the kind of memory; None where the array does not tell."""
    return int(x.__dlpack_device__()[0]) if offers(x, "__dlpack_device__") else None


def foreign_framework(x: Any) -> tuple[Framework, Any]:
    """How to treat an object that offers an array protocol: its framework, and the array to read.

    Raises:
        ArrayNotSupportedError: its memory is of a kind that nothing here can read.
    """
    if isinstance(x, np.generic):
        return _SCALAR, np.asarray(x)
    if is_on_card(x):
        return _import_cuda(x)
    if (kind := _dlpack_kind(x)) not in (None, *_HOST_TYPES):
        raise refuse(FOREIGN_HOST, f"an array on DLPack device type {kind}", "copy it to the host first")
    try:
        of_numpy = offers(x, "__array_interface__")
        return FOREIGN_HOST, np.asarray(x) if of_numpy else hostmemory.from_dlpack(x)
    except (TypeError, ValueError, RuntimeError, BufferError, AttributeError, KeyError) as error:
        what = f"an array of type {type(x).__qualname__}"
        raise refuse(FOREIGN_HOST, what, f"its memory cannot be read: {told(error)}") from error


def _import_cuda(x: Any) -> tuple[Framework, Any]:
    """``x`` as an array of the first installed framework that reads CUDA memory, without a copy."""
    for name in ("cupy", "torch"):
        target = registry.usable(name)
        if target is not None:
            try:
                return target, target.adopt(x, FOREIGN_HOST, CPU)
            except refusals(target) as error:
                instead = f"{name} cannot read it here ({told(error)}); copy it to the host first"
                raise refuse(FOREIGN_HOST, "a CUDA array", instead) from error
    raise refuse(FOREIGN_HOST, "a CUDA array", "install cupy or torch, which can read it")


# -- what is no array ------------------------------------------------------------------------------------


def unknown_array(x: Any) -> UnknownArrayError:
    """Return the error for an object that is not an array, with what would help."""
    cls = f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")
    return UnknownArrayError(
        f"an object of type {cls} is no array", reason=f"{cls} is no array", advice=advice_for(x)
    )
