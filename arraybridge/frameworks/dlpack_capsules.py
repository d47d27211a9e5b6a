"""DLPack capsules of host memory: made, read, and inspected."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import numpy as np

from arraybridge.frameworks.dtype_names import DLPACK_CODES, name_of, np_dtype
from arraybridge.frameworks.protocols import Importable
from arraybridge.frameworks.read_only import writable_alias

__all__ = ["capsule_address"]

_DLPACK_NAMES = {code: name for name, code in DLPACK_CODES.items()}

_UNSIGNED = 1
# Offset of DLTensor.dtype.code: void *data, DLDevice {int32, int32}, int32 ndim.
_CODE_OFFSET = 20
# Of DLTensor.byte_offset, after the dtype and pointers to shape and strides.
_BYTES_OFFSET = 40
# DLManagedTensorVersioned has version, manager_ctx, deleter and flags, of 8 bytes each, before the tensor.
_VERSIONED_OFFSET = 32

# Offset of DLTensor.device.device_type, after the data pointer.
_DEVICE_OFFSET = 8
# The flags are the last 8 bytes before the tensor.
_NEWEST_VERSION = (1, 0)
_FLAGS_BEFORE, _IS_READ_ONLY, _IS_COPIED = 8, 1, 2

# The flags of a versioned capsule, and of the tensor after them: data, device type, device, axes, dtype code.
_HEAD = struct.Struct("=QQiiiB")

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_capsule_name = ctypes.pythonapi.PyCapsule_GetName
_capsule_name.restype = ctypes.c_char_p
_capsule_name.argtypes = [ctypes.py_object]


def _tensor_of(exported: Any) -> int:
    """Address of the DLTensor, which begins with its data pointer, in a capsule not consumed yet."""
    name = _capsule_name(exported)
    return int(_capsule_pointer(exported, name)) + (_VERSIONED_OFFSET if b"versioned" in name else 0)


def capsule_address(exported: Any) -> int:
    """Address of the first element that a capsule lends, of OpenCL the handle; 0 where it is consumed."""
    if not (_capsule_name(exported) or b"").startswith(b"dltensor"):
        return 0
    data, offset = (
        ctypes.c_uint64.from_address(_tensor_of(exported) + at).value for at in (0, _BYTES_OFFSET)
    )
    return data + offset


def _code_of(exported: Any) -> ctypes.c_uint8:
    return ctypes.c_uint8.from_address(_tensor_of(exported) + _CODE_OFFSET)


def device_type_of(exported: Any) -> int:
    """Return the DLPack device type of the memory in a capsule that was not consumed yet.

    Raises:
        TypeError: If it is not such a capsule.
    """
    if type(exported).__name__ != "PyCapsule":
        raise TypeError(f"__dlpack__ returned {type(exported).__name__}, not a DLPack capsule")
    if not (_capsule_name(exported) or b"").startswith(b"dltensor"):
        raise TypeError("__dlpack__ returned a capsule that was consumed already")
    return ctypes.c_int32.from_address(_tensor_of(exported) + _DEVICE_OFFSET).value


def is_copied(exported: Any) -> bool:
    """Return whether a capsule states that it holds a copy, to which nothing else refers."""
    if b"versioned" not in (_capsule_name(exported) or b""):
        return False
    flags = ctypes.c_uint64.from_address(_tensor_of(exported) - _FLAGS_BEFORE).value
    return flags & (_IS_COPIED | _IS_READ_ONLY) == _IS_COPIED


def is_writable_extended(exported: Any) -> bool:
    """Return whether a capsule states that it holds a writable host array of an extended dtype, not 0-d."""
    name = _capsule_name(exported)
    if name is None or b"versioned" not in name:
        return False
    flags, _, device_type, _, axes, code = _HEAD.unpack(
        ctypes.string_at(_capsule_pointer(exported, name) + _VERSIONED_OFFSET - _FLAGS_BEFORE, _HEAD.size)
    )
    return device_type == 1 and axes > 0 and code in _DLPACK_NAMES and not flags & _IS_READ_ONLY


def export(x: Any) -> Any:
    """Return the capsule of a producer in host memory, if possible a versioned one.

    Only a versioned capsule states whether its memory may be written to.
    """
    try:
        return x.__dlpack__(max_version=_NEWEST_VERSION)
    except TypeError:  # a producer from before DLPack 1.0
        return x.__dlpack__()


def from_any_capsule(exported: Any) -> np.ndarray:
    """Return a NumPy view of a capsule of host memory, of any dtype that NumPy or ``ml_dtypes`` has."""
    code = _code_of(exported)
    name = _DLPACK_NAMES.get(code.value)
    if name is None:
        return np.from_dlpack(Importable(exported))
    code.value = _UNSIGNED
    return np.from_dlpack(Importable(exported)).view(np_dtype(name))


def capsule(view: np.ndarray) -> Any:
    """The DLPack capsule of an array, as a writable one, the extended dtypes of ``ml_dtypes`` included.

    NumPy refuses to export those, although DLPack has numbers for them: the bytes are exported as
    unsigned integers, and the capsule's dtype code is set to what they are.
    """
    if not view.flags.writeable:
        view = writable_alias(view)
    code = DLPACK_CODES.get(name_of(view.dtype)) if view.dtype.isbuiltin == 2 else None  # of ml_dtypes
    if code is None:
        return view.__dlpack__()
    exported = view.view(f"uint{8 * view.dtype.itemsize}").__dlpack__()
    _code_of(exported).value = code
    return exported


def from_capsule(exported: Any, dtype: np.dtype[Any]) -> np.ndarray:
    """Return a NumPy view of a capsule of host memory, the extended dtypes included.

    The view of an unversioned capsule is read-only, because such a capsule cannot state that its memory may
    be written to.
    """
    if name_of(dtype) in DLPACK_CODES:
        _code_of(exported).value = _UNSIGNED
    return np.from_dlpack(Importable(exported)).view(dtype)


def from_dlpack(x: Any) -> np.ndarray:
    """`np.from_dlpack` for any producer in host memory, that of the extended dtypes included."""
    try:
        return np.from_dlpack(x)
    except (BufferError, RuntimeError):  # NumPy has no such dtype
        exported = export(x)
        return from_capsule(exported, np_dtype(_DLPACK_NAMES[_code_of(exported).value]))
