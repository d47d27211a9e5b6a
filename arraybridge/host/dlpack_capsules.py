"""Functions that create, read, inspect and pass on DLPack capsules."""

from __future__ import annotations

import ctypes
import struct
from threading import Lock
from typing import Any

import numpy as np

from arraybridge.host.dtype_names import DLPACK_CODES, PLAIN, name_of, np_dtype
from arraybridge.host.read_only_memory import alias, writable_alias

__all__ = ["capsule_address", "capsule_pointer"]

#: The names of capsules. A consumer renames a capsule, for example to "used_dltensor".
UNVERSIONED, VERSIONED = b"dltensor", b"dltensor_versioned"

_HOST = 1
_UNSIGNED = 1
# The DLDataTypeCode of NumPy's own dtypes, by their kind.
_CODES = {"i": 0, "u": _UNSIGNED, "f": 2, "c": 5, "b": 6}
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

# DLTensor: data, device type, device number, number of axes, dtype, shape, strides, offset in bytes.
_TENSOR = struct.Struct("=QiiiIQQQ")
_TensorBytes = ctypes.c_char * _TENSOR.size


def _dtype_key(code: int, nbytes: int) -> int:
    """Return a DLDataType (code, bits, lanes) with one lane as the integer that `_TENSOR` reads."""
    key: int = struct.unpack("=I", struct.pack("=BBH", code, 8 * nbytes, 1))[0]
    return key


# DLDataType → the name of the dtype.
_PLAIN = {_dtype_key(_CODES[np.dtype(name).kind], np.dtype(name).itemsize): name for name in PLAIN}
_EXTENDED = {_dtype_key(code, 2 if name == "bfloat16" else 1): name for name, code in DLPACK_CODES.items()}
_NAMES = {**_PLAIN, **_EXTENDED}

# These are separate function objects, because those of `ctypes.pythonapi` are shared by the whole process,
# and other libraries also set their argument types.
capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_capsule_name = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(("PyCapsule_GetName", ctypes.pythonapi))


def is_versioned(exported: Any) -> bool:
    """Return whether a capsule has flags, which state whether its memory may be written to.

    Raises:
        ValueError: If ``exported`` is not a capsule, or was consumed: its memory may have been freed.
    """
    name = _capsule_name(exported)
    if name not in (UNVERSIONED, VERSIONED):
        raise ValueError("its DLPack capsule was already consumed")
    return name == VERSIONED


def _tensor_of(exported: Any) -> int:
    """Return the address of the DLTensor in a capsule that has not been consumed."""
    if is_versioned(exported):
        return int(capsule_pointer(exported, VERSIONED)) + _VERSIONED_OFFSET
    return int(capsule_pointer(exported, UNVERSIONED))


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


def device_type_of(exported: Any) -> int:
    """Return the DLPack device type of the memory in a capsule that has not been consumed."""
    return ctypes.c_int32.from_address(_tensor_of(exported) + _DEVICE_OFFSET).value


def renumber(exported: Any, index: int) -> Any:
    """Set the device number in a capsule that has not been consumed, and return the capsule."""
    ctypes.c_int32.from_address(_tensor_of(exported) + _DEVICE_OFFSET + 4).value = index
    return exported


def is_copied(exported: Any) -> bool:
    """Return whether a capsule states that it holds a writable copy that nothing else refers to."""
    return _flags_of(exported) & (_IS_COPIED | _IS_READ_ONLY) == _IS_COPIED


def is_read_only(exported: Any) -> bool:
    """Return whether a capsule states that its memory must not be written to."""
    return bool(_flags_of(exported) & _IS_READ_ONLY)


def _flags_of(exported: Any) -> int:
    """Return the flags of a capsule; 0 for unversioned capsules, which have none."""
    if not is_versioned(exported):
        return 0
    return ctypes.c_uint64.from_address(_tensor_of(exported) - _FLAGS_BEFORE).value


def check_importable(exported: Any, name: bytes, alignment: int) -> None:
    """Raise `NotImplementedError` unless a framework can import a capsule exactly and safely.

    Such a capsule has host memory, at least one axis, and a dtype of NumPy or ``ml_dtypes``. The framework
    itself raises for strides that it does not support.

    Args:
        exported: The capsule.
        name: The name of a capsule of this kind. Other capsules raise `ValueError`.
        alignment: The alignment in bytes that the framework requires. If it is 1, the framework may write to
            the memory, and negative strides may crash it. Otherwise, it misreads bools whose bytes are
            neither 0 nor 1.
    """
    tensor = capsule_pointer(exported, name)
    if name is VERSIONED:
        tensor += _VERSIONED_OFFSET
        if ctypes.c_uint64.from_address(tensor - _FLAGS_BEFORE).value & _IS_READ_ONLY:
            raise NotImplementedError
    data, device_type, _, axes, key, _, strides, offset = _TENSOR.unpack(_TensorBytes.from_address(tensor))
    dtype = _NAMES.get(key)
    if device_type != _HOST or not axes or dtype is None:
        raise NotImplementedError
    if alignment > 1:
        if (data + offset) % alignment or dtype == "bool":
            raise NotImplementedError
    elif dtype == "complex128" or (strides and min((ctypes.c_int64 * axes).from_address(strides)[:]) < 0):
        raise NotImplementedError  # PyTorch requires complex128 to be aligned


_NUMPY_READS_VERSIONED = tuple(map(int, np.__version__.split(".")[:2])) >= (2, 1)
_changes_code = Lock()


def export(x: Any) -> Any:
    """Return a DLPack capsule for an array in host memory, versioned if possible.

    Only versioned capsules state whether their memory may be written to. NumPy 2.1 and later can read them.
    """
    if not _NUMPY_READS_VERSIONED:
        return x.__dlpack__()
    try:
        return export_versioned(x)
    except TypeError:  # a producer from before DLPack 1.0
        return x.__dlpack__()


def export_versioned(x: Any) -> Any:
    """Return a versioned DLPack capsule for an array in host memory."""
    return x.__dlpack__(max_version=_NEWEST_VERSION)


def capsule(view: np.ndarray) -> Any:
    """Return a DLPack capsule of host memory for a NumPy array, with the dtypes of ``ml_dtypes`` too.

    The capsule is writable even if the array is read-only. NumPy does not export extended dtypes
    (numpy/numpy#19808), although DLPack has codes for them. They are exported as unsigned integers, and the
    capsule's dtype code is then corrected. Views of pinned memory, which NumPy exports with another device
    type, become host memory.
    """
    if not view.flags.writeable:
        view = writable_alias(view)
    # isbuiltin is 2 for ml_dtypes dtypes.
    code = DLPACK_CODES.get(name_of(view.dtype)) if view.dtype.isbuiltin == 2 else None
    if code is not None:
        view = view.view(f"uint{8 * view.dtype.itemsize}")
    if view.base is not None and view.__dlpack_device__()[0] != _HOST:
        view = alias(view)
    exported = view.__dlpack__()
    if code is not None:
        ctypes.c_uint8.from_address(_tensor_of(exported) + _CODE_OFFSET).value = code
    return exported


def from_capsule(exported: Any) -> np.ndarray:
    """Return a NumPy view of the host memory in a capsule, for any dtype of NumPy or ``ml_dtypes``.

    NumPy does not import extended dtypes, so their code is an unsigned integer while NumPy reads the capsule.
    Then the code is restored, because a producer may refer to the same tensor from several capsules. The view
    of an unversioned capsule is read-only (NumPy >= 2.2.5, numpy/numpy#28600), because such a capsule cannot
    state that its memory may be written to.

    Raises:
        ValueError: If ``exported`` is not a capsule, or was consumed.
    """
    tensor = _tensor_of(exported)
    name = _EXTENDED.get(_TENSOR.unpack(_TensorBytes.from_address(tensor))[4])
    if name is None:
        return np.from_dlpack(Importable(exported))
    dtype = np_dtype(name)
    code = ctypes.c_uint8.from_address(tensor + _CODE_OFFSET)
    with _changes_code:
        code.value = _UNSIGNED
        try:
            view = np.from_dlpack(Importable(exported))  # it keeps the tensor alive
        finally:
            code.value = DLPACK_CODES[name]
    return view.view(dtype)


def from_dlpack(x: Any) -> np.ndarray:
    """Return the same result as `np.from_dlpack`, but also support extended dtypes."""
    return from_capsule(export(x))


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
