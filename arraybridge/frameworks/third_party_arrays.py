"""Arrays of unknown libraries, which are converted through the array protocols that they support."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from arraybridge.errors import (
    ArrayNotSupportedError,
    CopyRequiredError,
    MemoryConversionError,
    UnknownArrayError,
    error_text,
)
from arraybridge.frameworks import dlpack_capsules, host_memory, read_only_memory, registry
from arraybridge.frameworks.base import Framework
from arraybridge.frameworks.device_access import CPU
from arraybridge.frameworks.numpy import NumpyFramework
from arraybridge.reasons import Cause, Reason

__all__ = [
    "FOREIGN_HOST",
    "check_readable_without_copy",
    "framework_of_producer",
    "importer",
    "is_on_gpu",
    "is_protocol_producer",
    "offers_on_instance",
    "opener",
    "unknown_array_error",
]

_PROTOCOLS = ("__dlpack__", "__array_interface__", "__cuda_array_interface__")
_NO_NUMBERS = (np.flexible, np.datetime64, np.timedelta64, np.object_)

# DLPack device types that the CPU can read: kDLCPU, kDLCUDAHost (pinned) and kDLROCMHost.
_HOST_TYPES = (1, 3, 11)
_CUDA_TYPES = (2, 13)
#: The frameworks that read CUDA memory from any library, in the order in which they are tried.
_CUDA_READERS = ("cupy", "torch")


#: The framework of third-party arrays in host memory, which are read through a NumPy view.
FOREIGN_HOST = NumpyFramework()


class _Fetched(NumpyFramework):
    """The framework of host copies that a producer's library made. No other object refers to them."""

    def to_host(self, x: np.ndarray) -> np.ndarray:
        return x

    host_view = copy = to_host


_SCALAR = NumpyFramework(Cause(Reason.NUMPY_SCALAR))


def is_protocol_producer(x: Any) -> bool:
    """Return whether ``x`` supports an array protocol. NumPy scalars do if they are numbers."""
    if issubclass(type(x), (type, *_NO_NUMBERS)):
        return False
    return any(offers(x, protocol) for protocol in _PROTOCOLS) and not _is_arrow_without_numbers(x)


def _is_arrow_without_numbers(x: Any) -> bool:
    """Return whether ``x`` is a non-numeric pyarrow array, which offers ``__dlpack__`` nevertheless."""
    pyarrow = sys.modules.get("pyarrow")
    if pyarrow is None or not issubclass(type(x), getattr(pyarrow, "Array", ())):
        return False
    return not (pyarrow.types.is_integer(x.type) or pyarrow.types.is_floating(x.type))


def offers(x: Any, protocol: str) -> bool:
    """Return whether ``x`` or its class has the attribute ``protocol``, without calling ``__getattr__``."""
    try:
        return hasattr(type(x), protocol) or protocol in getattr(x, "__dict__", ())
    except (RecursionError, MemoryError):
        raise
    except Exception:  # noqa: BLE001  # attributes of third-party objects may raise anything
        return False


def offers_on_instance(x: Any) -> bool:
    """Return whether ``x`` supports an array protocol that other instances of its class may not support."""
    return any(offers(x, protocol) and not hasattr(type(x), protocol) for protocol in _PROTOCOLS)


def is_on_gpu(x: Any) -> bool:
    """Return whether the memory of a third-party array is CUDA memory."""
    kind = None if isinstance(x, np.generic) else _dlpack_kind(x)
    if kind is not None:
        return kind in _CUDA_TYPES
    return offers(x, "__cuda_array_interface__") and not offers(x, "__array_interface__")


def _dlpack_kind(x: Any) -> int | None:
    """Return the DLPack device type of an array; None if it does not report one."""
    if not offers(x, "__dlpack_device__"):
        return None
    try:
        return int(x.__dlpack_device__()[0])
    except MemoryError:
        raise
    except Exception as error:  # third-party code may raise anything
        what = f"an array of type {type(x).__qualname__}"
        raise _unreadable_error(what, f"its __dlpack_device__() fails: {error_text(error)}") from error


def framework_of_producer(x: Any) -> tuple[Framework, Any]:
    """Return the framework and the readable array for an object that supports an array protocol.

    Raises:
        ArrayNotSupportedError: If no installed framework can read the memory of the object.
    """
    if isinstance(x, np.generic):
        return _SCALAR, np.asarray(x)
    kind = _dlpack_kind(x)
    if is_on_gpu(x):
        try:
            return _import_cuda(x)
        except ArrayNotSupportedError:
            if kind is None:
                raise
            return _fetched(x, kind)
    if kind is not None and kind not in _HOST_TYPES:
        reader = _reader_of(kind)
        if reader is None:
            return _fetched(x, kind)
        return reader, reader.interchange.import_from(x, FOREIGN_HOST, CPU)
    try:
        interface = _interface_of(x, "__array_interface__")
        _check_mask(x, interface)
        reads_dlpack = interface is None and offers(x, "__dlpack__")
        return FOREIGN_HOST, dlpack_capsules.from_dlpack(x) if reads_dlpack else np.asarray(x)
    except (MemoryError, MemoryConversionError):
        raise
    except Exception as error:  # third-party code may raise anything
        what = f"an array of type {type(x).__qualname__}"
        fix = "Correct its __array_interface__ or __dlpack__, or pass a NumPy array of its values"
        raise _unreadable_error(what, f"its memory cannot be read: {error_text(error)}. {fix}") from error


def _interface_of(x: Any, protocol: str) -> Any:
    """Return the array interface of an object; None if it has none, even if its class defines one."""
    return getattr(x, protocol, None) if offers(x, protocol) else None


def _check_mask(x: Any, interface: Any) -> None:
    """Raise `ArrayNotSupportedError` if an array interface has a mask, which imports would ignore."""
    if isinstance(interface, dict) and interface.get("mask") is not None:
        what = f"a masked array of type {type(x).__qualname__}"
        raise _unreadable_error(what, "its mask would be lost; pass its values without it")


def _import_cuda(x: Any) -> tuple[Framework, Any]:
    """Return ``x`` as an array of the first installed framework that reads CUDA memory, without a copy."""
    failed: Exception | None = None
    instead = "install cupy or torch, which can read it"
    for name in _CUDA_READERS:
        target = registry.load_or_none(name)
        if target is None:
            continue
        try:
            _check_mask(x, _interface_of(x, "__cuda_array_interface__"))
            return target, target.interchange.import_from(x, FOREIGN_HOST, CPU)
        except (MemoryError, MemoryConversionError):
            raise
        except Exception as error:  # noqa: BLE001  # third-party code may raise anything
            if failed is None:
                instead = f"{name} cannot read it here ({error_text(error)}); copy it to the host first"
                failed = error
    raise _unreadable_error("a CUDA array", instead) from failed


def _unreadable_error(what: str, instead: str) -> ArrayNotSupportedError:
    """Return the error for a third-party array. Its message names no framework."""
    return ArrayNotSupportedError(
        f"{what} cannot be converted", source_type=FOREIGN_HOST.name, reason=what, advice=instead
    )


def _reader_of(kind: int) -> Framework | None:
    """Return the loaded framework whose accelerator has this DLPack device type, such as PyTorch on ROCm."""
    return next((one for one in registry.loaded() if one.interchange.dlpack_device == kind), None)


# -- producers on devices that no installed framework reads ----------------------------------------------

_HOST = (1, 0)
# Keyword arguments of `__dlpack__`, the newest standard first: array API 2024, 2023, and producers that
# cannot copy on request.
_REQUESTS: tuple[dict[str, Any], ...] = (
    {"dl_device": _HOST, "copy": True, "max_version": (1, 0)},
    {"dl_device": _HOST, "copy": True},
    {"dl_device": _HOST, "max_version": (1, 0)},
    {"dl_device": _HOST},
)


def _fetched(x: Any, kind: int) -> tuple[Framework, np.ndarray]:
    """Return a copy of ``x`` in host memory, made by the producer's own library.

    The request has ``copy=True``, because a producer with unified memory may otherwise share its memory. If
    the capsule does not state that it holds a copy, this function copies its values.
    """
    failed: Exception | None = None
    for request in _REQUESTS if offers(x, "__dlpack__") else ():
        try:
            capsule = x.__dlpack__(**request)
            if dlpack_capsules.device_type_of(capsule) not in _HOST_TYPES:
                failed = failed or BufferError("it returned memory that is not on the host")
                continue
            is_copy = dlpack_capsules.is_copied(capsule)
            view = dlpack_capsules.from_any_capsule(capsule)
            memory = read_only_memory.writable_alias(view) if is_copy else host_memory.contiguous_copy(view)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001  # third-party code may raise anything
            if failed is None or not isinstance(error, TypeError):
                failed = error
            continue
        return _Fetched(Cause(Reason.LIBRARY_COPIES, source_device=_named(kind))), memory
    why = f": {error_text(failed)}" if failed is not None else ""
    instead = (
        f"no installed framework can read this memory, and __dlpack__(dl_device=(1, 0)) does not copy it to"
        f" the host{why}; copy it to the host with its own library first"
    )
    raise _unreadable_error(f"an array on {_named(kind)}", instead) from failed


def _named(kind: int) -> str:
    return f"DLPack device type {kind}"


def check_readable_without_copy(x: Any, target: str) -> None:
    """Raise `CopyRequiredError` if ``x`` can only be read through a copy that its own library makes."""
    if isinstance(x, np.generic) or not is_protocol_producer(x):
        return
    kind = _dlpack_kind(x)
    if kind is None or kind in _HOST_TYPES or _is_readable(kind):
        return
    cause = Cause(Reason.UNREADABLE_DEVICE, source_device=_named(kind))
    raise CopyRequiredError(
        f"copy=False cannot convert this {type(x).__qualname__} to {target}, because {cause.text}.",
        source_type="numpy",
        target_type=target,
        method="host",
        reason=cause.text,
        code=cause.code,
        advice="Pass copy=None, so that its library copies it to the host.",
    )


def _is_readable(kind: int) -> bool:
    """Return whether an installed framework reads memory of this DLPack device type."""
    if kind not in _CUDA_TYPES:
        return _reader_of(kind) is not None
    readers = (registry.load_or_none(name) for name in _CUDA_READERS)
    return any(one is not None and any(d.kind == "gpu" for d in one.devices.available()) for one in readers)


def opener(x: Any, opened: np.ndarray) -> Callable[[Any], np.ndarray] | None:
    """Return a function that opens host arrays of the class of ``x`` as NumPy views; None if there is none.

    The function raises `NotImplementedError` for an array that it cannot view.
    """
    cls = type(x)
    if isinstance(x, np.generic) or offers_on_instance(x):
        return None
    if hasattr(cls, "__array_interface__"):
        return None if hasattr(cls, "__dlpack_device__") else _open_interface
    if not hasattr(cls, "__dlpack_device__"):
        return None
    # NumPy cannot import bfloat16 or float8, and an exception takes longer than importing the capsule.
    return _open_extended if opened.dtype.isbuiltin == 2 else _open_host_memory


def _open_interface(x: Any) -> np.ndarray:
    try:
        if x.__array_interface__.get("mask") is None:
            return np.asarray(x)
    except MemoryError:
        raise
    except Exception as error:  # third-party code may raise anything; the slow path reports it
        raise NotImplementedError from error
    raise NotImplementedError


def _open_host_memory(x: Any) -> np.ndarray:
    opened: np.ndarray = _open(x, np.from_dlpack)
    return opened


def _open_extended(x: Any) -> np.ndarray:
    opened: np.ndarray = _open(x, _import_extended)
    return opened


def _import_extended(x: Any) -> np.ndarray:
    return dlpack_capsules.from_any_capsule(dlpack_capsules.export(x))


def importer(opened: Callable[[Any], np.ndarray], target: Framework) -> Callable[[Any], Any] | None:
    """Return a function that imports arrays into ``target`` without a NumPy view; None if there is none.

    ``opened`` is the function that `opener` returned. An import function exists only for extended dtypes. It
    avoids creating the view, which would take as long as the import by PyTorch, and it raises
    `NotImplementedError` for other arrays.
    """
    import_from = target.fast_path.fast_import
    if opened is not _open_extended or import_from is None or not target.mutable or target.alignment > 1:
        return None

    def import_writable(x: Any) -> Any:
        return import_from(_open(x, _export_writable))

    return import_writable


def _export_writable(x: Any) -> Any:
    exported = dlpack_capsules.export(x)
    if not dlpack_capsules.is_writable_extended(exported):
        raise NotImplementedError
    return exported


def _open(x: Any, read: Callable[[Any], Any]) -> Any:
    try:
        if x.__dlpack_device__()[0] == 1:
            return read(x)
    except MemoryError:
        raise
    except Exception as error:  # third-party code may raise anything; the slow path reports it
        raise NotImplementedError from error
    raise NotImplementedError


# -- other objects ---------------------------------------------------------------------------------------


def _class_name(cls: type) -> str:
    """Return the name by which users import a class, such as ``polars.Series``, or else its full name."""
    top = str(cls.__module__).partition(".")[0]
    if vars(sys.modules.get(top, builtins)).get(cls.__name__) is cls:
        return f"{top}.{cls.__name__}".removeprefix("builtins.")
    return f"{cls.__module__}.{cls.__qualname__}".removeprefix("builtins.")


def unknown_array_error(x: Any) -> UnknownArrayError:
    """Return the error for an object that is not an array, with advice."""
    from arraybridge.frameworks.non_array_advice import advice_for_object  # only errors need it

    cls = _class_name(type(x))
    return UnknownArrayError(
        f"an object of type {cls} is not an array",
        reason=f"{cls} is not an array",
        advice=advice_for_object(x),
    )
