"""Arrays of unknown libraries, which are converted through the array protocols that they support."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from operator import index
from typing import Any, TypeVar

import numpy as np

from arraybridge.errors import (
    ArrayNotSupportedError,
    CopyRequiredError,
    MemoryConversionError,
    error_text,
    text_or_raise,
)
from arraybridge.frameworks.numpy.framework import NumpyFramework
from arraybridge.host import buffers, dlpack_capsules, read_only_memory
from arraybridge.host.dlpack_capsules import UNVERSIONED, VERSIONED
from arraybridge.interface import registry
from arraybridge.interface.devices import CPU
from arraybridge.interface.framework import Framework, NoPlanError
from arraybridge.reasons import Cause, Reason

__all__ = [
    "FOREIGN_HOST",
    "HOST_PRODUCERS",
    "WITHOUT_FLAGS",
    "check_readable_without_copy",
    "framework_of_producer",
    "is_on_gpu",
    "is_protocol_producer",
    "make_importer",
    "make_opener",
    "offers_on_instance",
    "restrict_to_host",
    "view_for",
]

T = TypeVar("T")

_PROTOCOLS = ("__dlpack__", "__array_interface__", "__cuda_array_interface__")
_NO_NUMBERS = (np.flexible, np.datetime64, np.timedelta64, np.object_)

# DLPack device types that the CPU can read: kDLCPU, kDLCUDAHost (pinned) and kDLROCMHost. JAX imports only
# kDLCPU (jax-ml/jax#22346).
_HOST_TYPES = (1, 3, 11)
_CUDA_TYPES = (2, 13)
#: The frameworks that read CUDA memory from any library, in the order in which they are tried.
_CUDA_READERS = ("cupy", "torch")


#: The framework of third-party arrays in host memory, which are read through a NumPy view.
FOREIGN_HOST = NumpyFramework()
#: The framework of third-party arrays whose capsules are older than DLPack 1.0, and cannot state whether the
#: memory is read-only. The view is read-only, as in NumPy. Other targets share the memory, as their
#: ``from_dlpack`` functions do.
WITHOUT_FLAGS = NumpyFramework()
HOST_PRODUCERS = (FOREIGN_HOST, WITHOUT_FLAGS)


class _Fetched(NumpyFramework):
    """The framework of copies of third-party arrays in host memory. No other object refers to them."""

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
    return _read(_read_dlpack_kind, x, "its __dlpack_device__() fails")


def _read_dlpack_kind(x: Any) -> int:
    kind = x.__dlpack_device__()[0]
    # Enums of pybind11 and nanobind classes may have no __index__, only a value.
    return index(kind if hasattr(kind, "__index__") else kind.value)


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
            return _fetch(x, kind)
    if kind is not None and kind not in _HOST_TYPES:
        reader = _reader_of(kind)
        if reader is None:
            return _fetch(x, kind)
        return reader, reader.interchange.import_from(x, FOREIGN_HOST, CPU)
    fix = ". Correct its __array_interface__ or __dlpack__, or pass a NumPy array of its values"
    return _read(_read_host_memory, x, "its memory cannot be read", fix)


def _read(read: Callable[[Any], T], x: Any, problem: str, fix: str = "") -> T:
    """Return ``read(x)``; replace the exceptions of the object's library by `ArrayNotSupportedError`."""
    try:
        return read(x)
    except (MemoryError, MemoryConversionError):
        raise
    except Exception as error:  # third-party code may raise anything
        what = f"an array of type {type(x).__qualname__}"
        raise _unreadable_error(what, f"{problem}: {text_or_raise(error)}", fix) from error


def _read_host_memory(x: Any) -> tuple[Framework, np.ndarray]:
    """Return a NumPy view of an array in host memory, through DLPack if possible, and its framework.

    Array interfaces have no names for bfloat16 and float8, which some libraries export as integers.
    """
    interface = _interface_of(x, "__array_interface__")
    _check_mask(x, interface)
    if offers(x, "__dlpack__"):
        try:
            exported = dlpack_capsules.export(x)
        except MemoryError:
            raise
        except Exception:  # third-party code may raise anything; the array interface remains
            if interface is None:
                raise
        else:
            has_flags = dlpack_capsules.is_versioned(exported)
            return FOREIGN_HOST if has_flags else WITHOUT_FLAGS, dlpack_capsules.from_capsule(exported)
    view = np.asarray(x)
    again = np.asarray(x)
    if view.ctypes.data == again.ctypes.data:
        return FOREIGN_HOST, again
    return _Fetched(Cause(Reason.NEW_MEMORY)), buffers.contiguous_copy(again)


def _interface_of(x: Any, protocol: str) -> Any:
    """Return the array interface of an object; None if it has none, even if its class defines one."""
    return getattr(x, protocol, None) if offers(x, protocol) else None


def _check_mask(x: Any, interface: Any) -> None:
    """Raise `ArrayNotSupportedError` if an array interface has a mask, which imports would ignore."""
    if isinstance(interface, dict) and interface.get("mask") is not None:
        what = f"a masked array of type {type(x).__qualname__}"
        raise _unreadable_error(what, "its mask would be lost", "; pass its values without it")


class _CudaProducer:
    """A producer that records whether its CUDA memory is read-only.

    CuPy 14 (cupy/cupy#2616) and PyTorch 2.13 (pytorch/pytorch#32868) ignore this flag.
    """

    def __init__(self, x: Any) -> None:
        self._x = x
        self.is_read_only = False

    def __dlpack__(self, **options: Any) -> Any:
        exported = self._x.__dlpack__(**options)
        self.is_read_only = dlpack_capsules.is_read_only(exported)
        return exported

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self._x.__dlpack_device__()
        return device


def _import_cuda(x: Any) -> tuple[Framework, Any]:
    """Return ``x`` as an array of the first installed framework that reads CUDA memory, without a copy."""
    failed: Exception | None = None
    reason = "no installed framework reads CUDA memory"
    fix = "; install cupy or torch, which can read it"
    for name in _CUDA_READERS:
        target = registry.load_or_none(name)
        if target is None:
            continue
        try:
            interface = _interface_of(x, "__cuda_array_interface__")
            _check_mask(x, interface)
            producer = _CudaProducer(x) if offers(x, "__dlpack__") else x
            imported = target.interchange.import_from(producer, FOREIGN_HOST, CPU)
            is_read_only = interface["data"][1] if producer is x else producer.is_read_only
        except (MemoryError, MemoryConversionError):
            raise
        except Exception as error:  # noqa: BLE001  # third-party code may raise anything
            if failed is None:
                reason = f"{name} cannot read it here ({error_text(error)})"
                fix = "; copy it to the host first"
                failed = error
            continue
        if is_read_only:
            begin = target.interchange.address(imported)
            read_only_memory.record(imported, begin, target.nbytes(imported))
        return target, imported
    raise _unreadable_error("a CUDA array", reason, fix) from failed


def _unreadable_error(what: str, reason: str, fix: str = "") -> ArrayNotSupportedError:
    """Return the error for a third-party array. ``fix`` ends the sentence that begins with ``reason``."""
    return ArrayNotSupportedError(
        f"Cannot convert {what}", source_type=FOREIGN_HOST.name, reason=reason, advice=reason + fix
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


def _fetch(x: Any, kind: int) -> tuple[Framework, np.ndarray]:
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
            view = dlpack_capsules.from_capsule(capsule)
            memory = read_only_memory.writable_alias(view) if is_copy else buffers.contiguous_copy(view)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001  # third-party code may raise anything
            if failed is None or not isinstance(error, TypeError):
                failed = error
            continue
        return _Fetched(Cause(Reason.LIBRARY_COPIES, source_device=_name_device_type(kind))), memory
    why = f": {error_text(failed)}" if failed is not None else ""
    reason = (
        "no installed framework can read this memory, and __dlpack__(dl_device=(1, 0)) does not copy it to"
        f" the host{why}"
    )
    fix = "; copy it to the host with its own library first"
    raise _unreadable_error(f"an array on {_name_device_type(kind)}", reason, fix) from failed


def _name_device_type(kind: int) -> str:
    return f"DLPack device type {kind}"


def check_readable_without_copy(x: Any, target: str) -> None:
    """Raise `CopyRequiredError` if ``x`` can only be read through a copy that its own library makes."""
    if isinstance(x, np.generic) or not is_protocol_producer(x):
        return
    kind = _dlpack_kind(x)
    if kind is None or kind in _HOST_TYPES or _is_readable(kind):
        return
    cause = Cause(Reason.UNREADABLE_DEVICE, source_device=_name_device_type(kind))
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


# -- plans ---------------------------------------------------------------------------------------------


def view_for(target: Framework, source: Framework, view: np.ndarray) -> np.ndarray:
    """Return the view of a third-party array as ``target`` may import it.

    Memory of a capsule without flags may be written to, unless ``target`` has read-only arrays.
    """
    is_writable = source is WITHOUT_FLAGS and not target.respects_read_only
    return read_only_memory.writable_alias(view) if is_writable else view


def make_opener(x: Any, opened: np.ndarray, target: Framework) -> Callable[[Any], np.ndarray] | None:
    """Return a function that opens host arrays of the class of ``x`` as NumPy views; None if there is none.

    The function raises `NoPlanError` for an array that it cannot view.

    Args:
        x: An array of another library.
        opened: Its NumPy view.
        target: The framework that imports the views.
    """
    cls = type(x)
    if isinstance(x, np.generic):
        return np.asarray
    if offers_on_instance(x):
        return None

    def read(x: Any) -> np.ndarray:
        source, view = _read_host_memory(x)
        if source not in HOST_PRODUCERS:
            raise NoPlanError
        return view_for(target, source, view)

    def read_once(x: Any) -> np.ndarray:
        exported = dlpack_capsules.export(x)
        source = FOREIGN_HOST if dlpack_capsules.is_versioned(exported) else WITHOUT_FLAGS
        return view_for(target, source, np.from_dlpack(dlpack_capsules.Importable(exported)))

    if not _offers_only_dlpack(cls) or opened.dtype.isbuiltin == 2:  # NumPy imports no extended dtypes
        return partial(_call_or_no_plan, read)
    return partial(_call_or_no_plan, np.from_dlpack if target.respects_read_only else read_once)


def _call_or_no_plan(function: Callable[[Any], Any], x: Any) -> Any:
    """Return ``function(x)``; replace every exception except MemoryError by `NoPlanError`."""
    try:
        return function(x)
    except MemoryError:
        raise
    except Exception as error:  # third-party code may raise anything; the slow path reports it
        raise NoPlanError from error


def make_importer(
    x: Any, opened: np.ndarray, source: Framework, target: Framework
) -> Callable[[Any], Any] | None:
    """Return a function that imports capsules of the class of ``x`` without a NumPy view, or None.

    The function raises `NoPlanError` for an array that the target cannot import as it is.

    A view is fast to create, but slow to export again if the dtype is extended or if the view is read-only,
    as for capsules without flags. JAX and TensorFlow, which require alignment, import only such capsules.
    """
    import_from = target.fast_path.fast_import
    requires_alignment = target.alignment > 1
    if import_from is None or offers_on_instance(x) or not _offers_only_dlpack(type(x)):
        return None
    if requires_alignment or source is WITHOUT_FLAGS:
        name = UNVERSIONED
    elif opened.dtype.isbuiltin == 2:
        name = VERSIONED
    else:
        return None
    alignment = target.alignment

    def import_capsule(x: Any) -> Any:
        exported = x.__dlpack__() if name is UNVERSIONED else dlpack_capsules.export_versioned(x)
        dlpack_capsules.check_importable(exported, name, alignment)
        return import_from(exported)

    return partial(_call_or_no_plan, import_capsule)


def restrict_to_host(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function like ``convert`` that raises `NoPlanError` for arrays on other devices.

    Without this check, the device is read from the capsule, for which the other library may have copied.
    """

    def convert_on_host(x: Any) -> Any:
        if _dlpack_kind(x) not in (None, *_HOST_TYPES):
            raise NoPlanError
        return convert(x)

    return convert_on_host


def _offers_only_dlpack(cls: type) -> bool:
    return hasattr(cls, "__dlpack__") and not hasattr(cls, "__array_interface__")
