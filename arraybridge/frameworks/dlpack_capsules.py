"""Functions that create, read, inspect and pass on DLPack capsules."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import numpy as np

from arraybridge.frameworks.dtype_names import DLPACK_CODES, name_of, np_dtype
from arraybridge.frameworks.read_only_memory import writable_alias

__all__ = ["capsule_address"]

_DLPACK_NAMES = {code: name for name, code in DLPACK_CODES.items()}

_UNSIGNED = 1
# Offset of DLTensor.dtype.code: void *data, DLDevice {int32, int32}, int32 ndim.
_CODE_OFFSET = 20
# Offset of DLTensor.byte_offset, after the dtype and pointers to shape and strides.
_BYTES_OFFSET = 40
# DLManagedTensorVersioned has version, manager_ctx, deleter and flags (8 bytes each) before the tensor.
_VERSIONED_OFFSET = 32

# Offset of DLTensor.device.device_type, after the data pointer.
_DEVICE_OFFSET = 8
_NEWEST_VERSION = (1, 0)
# The flags are the last 8 bytes before the tensor.
_FLAGS_BEFORE, _IS_READ_ONLY, _IS_COPIED = 8, 1, 2

# The flags of a versioned capsule, and the first fields of the tensor that follows them: data, device type,
# device number, number of axes, dtype code.
_HEAD = struct.Struct("=QQiiiB")

# These are separate function objects, because those of `ctypes.pythonapi` are shared by the whole process,
# and other libraries also set their argument types.
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_capsule_name = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(("PyCapsule_GetName", ctypes.pythonapi))


def _tensor_of(exported: Any) -> int:
    """Return the address of the DLTensor in a capsule that has not been consumed."""
    name = _capsule_name(exported)
    return int(_capsule_pointer(exported, name)) + (_VERSIONED_OFFSET if b"versioned" in name else 0)


def capsule_address(exported: Any) -> int:
    """Return the address of the first element in a capsule; 0 if the capsule was consumed.

    For OpenCL memory, this is the handle of the buffer.
    """
    if not (_capsule_name(exported) or b"").startswith(b"dltensor"):
        return 0
    data, offset = (
        ctypes.c_uint64.from_address(_tensor_of(exported) + at).value for at in (0, _BYTES_OFFSET)
    )
    return data + offset


def _code_of(exported: Any) -> ctypes.c_uint8:
    """Return the DLPack dtype code of a capsule, as a reference through which it can be changed."""
    return ctypes.c_uint8.from_address(_tensor_of(exported) + _CODE_OFFSET)


def _extended_dtype_of(exported: Any) -> np.dtype[Any] | None:
    """Return the dtype of a capsule if it is a dtype from ``ml_dtypes``; None for any other dtype."""
    code, bits, lanes = struct.unpack("=BBH", ctypes.string_at(_tensor_of(exported) + _CODE_OFFSET, 4))
    name = _DLPACK_NAMES.get(code)
    if name is None or lanes != 1:
        return None
    dtype = np_dtype(name)
    return dtype if bits == 8 * dtype.itemsize else None


def device_type_of(exported: Any) -> int:
    """Return the DLPack device type of the memory in a capsule that has not been consumed.

    Raises:
        TypeError: If ``exported`` is not such a capsule.
    """
    if type(exported).__name__ != "PyCapsule":
        raise TypeError(f"__dlpack__ returned {type(exported).__name__}, not a DLPack capsule")
    if not (_capsule_name(exported) or b"").startswith(b"dltensor"):
        raise TypeError("__dlpack__ returned a capsule that was already consumed")
    return ctypes.c_int32.from_address(_tensor_of(exported) + _DEVICE_OFFSET).value


def is_copied(exported: Any) -> bool:
    """Return whether a capsule states that it holds a writable copy that nothing else refers to."""
    if b"versioned" not in (_capsule_name(exported) or b""):
        return False
    flags = ctypes.c_uint64.from_address(_tensor_of(exported) - _FLAGS_BEFORE).value
    return flags & (_IS_COPIED | _IS_READ_ONLY) == _IS_COPIED


def is_writable_extended(exported: Any) -> bool:
    """Return whether a capsule contains a writable host array of an extended dtype with at least one axis.

    The result is False for unversioned capsules.
    """
    name = _capsule_name(exported)
    if name is None or b"versioned" not in name:
        return False
    flags, _, device_type, _, axes, code = _HEAD.unpack(
        ctypes.string_at(_capsule_pointer(exported, name) + _VERSIONED_OFFSET - _FLAGS_BEFORE, _HEAD.size)
    )
    return device_type == 1 and axes > 0 and code in _DLPACK_NAMES and not flags & _IS_READ_ONLY


_NUMPY_READS_VERSIONED = tuple(map(int, np.__version__.split(".")[:2])) >= (2, 1)


def export(x: Any) -> Any:
    """Return a DLPack capsule for an array in host memory, versioned if possible.

    Only versioned capsules state whether their memory may be written to. NumPy 2.1 and later can read them.
    """
    if not _NUMPY_READS_VERSIONED:
        return x.__dlpack__()
    try:
        return x.__dlpack__(max_version=_NEWEST_VERSION)
    except TypeError:  # a producer from before DLPack 1.0
        return x.__dlpack__()


def from_any_capsule(exported: Any) -> np.ndarray:
    """Return a NumPy view of the host memory in a capsule, for any dtype of NumPy or ``ml_dtypes``."""
    dtype = _extended_dtype_of(exported)
    return np.from_dlpack(Importable(exported)) if dtype is None else from_capsule(exported, dtype)


def capsule(view: np.ndarray) -> Any:
    """Return a DLPack capsule for a NumPy array. The extended dtypes of ``ml_dtypes`` are supported.

    The capsule is writable even if the array is read-only. NumPy does not export extended dtypes, although
    DLPack has codes for them. They are exported as unsigned integers, and the capsule's dtype code is then
    corrected.
    """
    if not view.flags.writeable:
        view = writable_alias(view)
    # isbuiltin is 2 for ml_dtypes dtypes.
    code = DLPACK_CODES.get(name_of(view.dtype)) if view.dtype.isbuiltin == 2 else None
    if code is None:
        return view.__dlpack__()
    exported = view.view(f"uint{8 * view.dtype.itemsize}").__dlpack__()
    _code_of(exported).value = code
    return exported


def from_capsule(exported: Any, dtype: np.dtype[Any]) -> np.ndarray:
    """Return a NumPy view of the host memory in a capsule.

    The extended dtypes of ``ml_dtypes`` are supported. The view of an unversioned capsule is read-only,
    because such a capsule cannot state that its memory may be written to.
    """
    if name_of(dtype) in DLPACK_CODES:
        _code_of(exported).value = _UNSIGNED
    return np.from_dlpack(Importable(exported)).view(dtype)


def from_dlpack(x: Any) -> np.ndarray:
    """Return the same result as `np.from_dlpack`, but also support extended dtypes."""
    try:
        return np.from_dlpack(x)
    except (BufferError, RuntimeError):  # NumPy may not support the dtype
        exported = export(x)
        dtype = _extended_dtype_of(exported)
        if dtype is None:
            raise
        return from_capsule(exported, dtype)


class Importable:
    """A DLPack capsule in the form that ``from_dlpack`` functions accept. It ignores the requested stream.

    ``device`` is the DLPack device: ``(1, 0)`` for host memory, ``(2, i)`` for CUDA device ``i``.
    """

    def __init__(self, exported: Any, device: tuple[int, int] = (1, 0)) -> None:
        self._exported = exported
        self._device = device

    def __dlpack__(self, **_: Any) -> Any:
        return self._exported

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device
