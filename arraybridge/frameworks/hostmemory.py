"""Host memory, which every framework's way to the host goes through: copies, capsules, what is lent."""

from __future__ import annotations

import ctypes
import math
import sys
import weakref
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np

from arraybridge.errors import DtypeNotSupportedError

__all__ = [
    "MAX_RANK",
    "PLAIN",
    "address",
    "aligned",
    "compact",
    "dtype_of",
    "extents",
    "fresh",
    "is_lent",
    "lend",
    "lent_at",
    "np_dtype",
    "packed",
    "word_of",
    "writable_alias",
]

#: JAX and TensorFlow share host memory only where it is aligned to this many bytes.
ALIGNMENT = 64

#: The most axes that a NumPy array can have.
MAX_RANK = 64 if int(np.__version__.partition(".")[0]) >= 2 else 32

# From this many bytes on it pays to choose how to copy.
_LARGE = 1 << 16

_first_byte, _address_of = ctypes.c_char.from_buffer, ctypes.addressof

# -- dtypes ------------------------------------------------------------------------------------------

#: The dtypes of numbers that NumPy has itself.
PLAIN = frozenset(
    (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
)

# DLPack's numbers for dtypes that NumPy does not export, from DLDataTypeCode in dlpack.h (version 1.1), where
# those of float8 begin at 7.
_FLOAT8 = ("e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")
_DLPACK_CODES = {"bfloat16": 4, **{f"float8_{kind}": code for code, kind in enumerate(_FLOAT8, 7)}}
_DLPACK_NAMES = {code: name for name, code in _DLPACK_CODES.items()}
#: bfloat16 and the float8 types, for which DLPack has numbers.
DLPACK = frozenset(_DLPACK_CODES)

#: The dtypes that NumPy has through ``ml_dtypes``.
EXTENDED = DLPACK | {"int4", "uint4", "int2", "uint2", "float4_e2m1fn"}


def np_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of that name; the extended ones (bfloat16, float8) come from ``ml_dtypes``.

    Raises:
        DtypeNotSupportedError: NumPy has no such dtype, or ``ml_dtypes`` is needed and missing.
    """
    if name not in EXTENDED:
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError as error:
        raise DtypeNotSupportedError(
            f"NumPy holds {name} only through the package ml_dtypes, which is not installed;"
            f' run "pip install ml_dtypes", or pass dtype="float32" to ask for a cast',
            reason="ml_dtypes is not installed",
        ) from error
    return np.dtype(getattr(ml_dtypes, name))


def word_of(dtype: Any) -> str:
    """What a dtype is called that is given by name, as NumPy takes it, or as a framework's own."""
    if isinstance(dtype, (type, np.dtype)):
        with suppress(TypeError):
            return np.dtype(dtype).name
    # torch's prints as torch.float32, TensorFlow's has a name.
    return str(dtype if isinstance(dtype, str) else getattr(dtype, "name", dtype)).removeprefix("torch.")


def dtype_of(dtype: Any) -> np.dtype[Any]:
    """Return the NumPy dtype of a name, a type, or a framework's own dtype such as ``torch.float32``.

    Raises:
        DtypeNotSupportedError: NumPy has this dtype only through ``ml_dtypes``, which is missing.
        TypeError: there is no such dtype.
    """
    if isinstance(dtype, np.dtype):
        return dtype
    try:
        return np.dtype(dtype) if isinstance(dtype, type) else np_dtype(word_of(dtype))
    except DtypeNotSupportedError:
        raise
    except (TypeError, ValueError, SyntaxError) as error:  # NumPy parses "f4,," as Python code
        raise TypeError(
            f"dtype={dtype!r} is not understood. Pass a NumPy dtype, the name of one, or a dtype such as"
            " torch.float32."
        ) from error


@lru_cache
def name_of(dtype: np.dtype[Any]) -> str:
    """``dtype.name``, which NumPy puts together anew each time, in a microsecond."""
    return dtype.name


# -- memory ------------------------------------------------------------------------------------------


def address(view: np.ndarray) -> int:
    """Address of the first element."""
    if not view.flags.carray:  # to be refused as a buffer takes four times as long as to ask
        return int(view.ctypes.data)
    try:
        return _address_of(_first_byte(view))  # type: ignore[arg-type]  # an array is a buffer
    except (TypeError, ValueError, BufferError):
        # It is empty, or no buffer.
        return int(view.ctypes.data)


def extents(shape: Any) -> tuple[int, ...]:
    """A shape as NumPy takes it: a whole number, or several.

    Raises:
        TypeError: it is neither.
        ValueError: one of them is negative, or they are too large or too many.
    """
    try:
        if isinstance(shape, (str, bytes, bytearray)):
            raise TypeError("text is not a shape")
        return np.broadcast_to(0, shape).shape
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"shape={shape!r} is not a shape for NumPy. Pass a whole number, or several, none negative."
        ) from error


def aligned(shape: int | tuple[int, ...], dtype: Any = "float64") -> np.ndarray:
    """An uninitialised NumPy array in memory that every framework here can share, aligned to 64 bytes.

    NumPy's own arrays are aligned to 16 bytes. JAX and TensorFlow, which want 64, share about one in four of
    the small ones, by chance, and none of the large ones; what they cannot share is copied once.

    Args:
        shape: number of elements along each axis; C-contiguous.
        dtype: of NumPy, by name (``"float32"``; ``"bfloat16"`` with ``ml_dtypes``), or as ``torch.float32``.

    Raises:
        DtypeNotSupportedError: NumPy has this dtype only through ``ml_dtypes``, which is missing.
        TypeError: there is no such dtype, or the shape is no whole number, nor several.
        ValueError: a negative extent, or a dtype whose elements are Python objects.

    >>> image = aligned((512, 512), "float32")
    >>> image[:] = 0
    >>> image.ctypes.data % 64
    0
    """
    elements = dtype_of(dtype)
    if elements.hasobject:
        raise ValueError(f"dtype={elements} holds Python objects, which no other framework can share")
    return packed(extents(shape), elements)


def packed(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """An uninitialised C-contiguous array, aligned to `ALIGNMENT` bytes.

    The memory is NumPy's, since NumPy asks the kernel for huge pages from 4 MiB up and torch does not,
    which makes the first touch up to five times faster where the kernel gives them only on request.
    """
    memory = np.empty(dtype.itemsize * math.prod(shape) + ALIGNMENT, np.uint8)
    start = -_address_of(_first_byte(memory)) % ALIGNMENT  # type: ignore[arg-type]
    return np.ndarray(shape, dtype, memory, start)


def fresh(view: np.ndarray) -> np.ndarray:
    """A C-contiguous copy in native byte order, aligned to `ALIGNMENT` bytes."""
    dtype = view.dtype
    result = packed(view.shape, dtype if dtype.isnative else dtype.newbyteorder("="))
    is_large = view.nbytes >= _LARGE and not view.flags.c_contiguous
    if is_large and dtype.isnative and dtype.itemsize in (1, 2, 4, 8):
        # What torch copies of other layouts is there up to seven times as fast (2-D, transposed).
        from_numpy = getattr(sys.modules.get("torch"), "from_numpy", None)
        if from_numpy is not None:
            with suppress(ValueError):  # it has no negative strides, nor any between elements
                bits = f"int{8 * dtype.itemsize}"  # so that no value is touched
                source = from_numpy(writable_alias(view).view(np.ndarray).view(bits))
                from_numpy(result.view(bits)).copy_(source)
                return result
    result[...] = view
    return result


def compact(view: np.ndarray) -> np.ndarray:
    """A C-contiguous copy in native byte order, for a framework that minds no alignment beyond NumPy's."""
    dtype = view.dtype
    if view.nbytes >= _LARGE:
        return fresh(view)
    return np.array(view, order="C") if dtype.isnative else view.astype(dtype.newbyteorder("="), order="C")


# -- read-only memory ------------------------------------------------------------------------------------


class Exported:
    """Memory by an array protocol alone: an attribute of that name; ``owner`` has to live as long as it."""

    def __init__(self, owner: Any = None, **protocols: Any) -> None:
        self.owner = owner
        vars(self).update(protocols)


def writable_alias(view: np.ndarray) -> np.ndarray:
    """The same memory without NumPy's read-only flag, for a consumer that never writes.

    JAX and TensorFlow never write into memory that they are lent, but their DLPack version has no
    read-only flag, so that NumPy refuses to export read-only arrays to them.
    """
    if view.flags.writeable:
        return view
    if name_of(view.dtype) in EXTENDED:  # the interface has no name for these
        return writable_alias(view.view(f"uint{8 * view.dtype.itemsize}")).view(view.dtype)
    interface = view.__array_interface__
    pointer, _ = interface["data"]
    return np.asarray(Exported(view, __array_interface__={**interface, "data": (pointer, False)}))


#: Begin and end of the read-only memory that immutable frameworks are lent now, by what keeps it.
lent: dict[weakref.ref[Any], tuple[int, int]] = {}


def lend(view: np.ndarray) -> np.ndarray:
    """What an immutable framework is lent of a mutable one; `is_lent` knows the read-only memory among it."""
    alias = writable_alias(view)
    if alias is not view:
        owner: Any = alias
        while isinstance(owner, np.ndarray):  # to what lives as long as the framework has the memory
            owner = owner.base
        begin = int(view.ctypes.data)
        lent[weakref.ref(owner, lent.pop)] = (begin, begin + view.nbytes)
    return alias


def is_lent(begin: int) -> bool:
    """Whether an array of an immutable framework that begins there shows memory that nobody may write to."""
    return any(start <= begin < stop for start, stop in [*lent.values()])


# -- DLPack ----------------------------------------------------------------------------------------------

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
_FLAGS_BEFORE, _IS_READ_ONLY, _IS_COPIED = 8, 1, 2

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


def lent_at(exported: Any) -> int:
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


def from_extended(exported: Any) -> np.ndarray:
    """Return a NumPy view of a capsule of bfloat16 or float8 in host memory.

    Raises:
        NotImplementedError: If it holds another dtype.
    """
    name = _DLPACK_NAMES.get(_code_of(exported).value)
    if name is None:
        raise NotImplementedError
    return from_capsule(exported, np_dtype(name))


def from_any_capsule(exported: Any) -> np.ndarray:
    """Return a NumPy view of a capsule of host memory, of any dtype that NumPy or ``ml_dtypes`` has."""
    name = _DLPACK_NAMES.get(_code_of(exported).value)
    return np.from_dlpack(Importable(exported)) if name is None else from_capsule(exported, np_dtype(name))


def capsule(view: np.ndarray) -> Any:
    """The DLPack capsule of an array, as a writable one, the extended dtypes of ``ml_dtypes`` included.

    NumPy refuses to export those, although DLPack has numbers for them: the bytes are exported as
    unsigned integers, and the capsule's dtype code is set to what they are.
    """
    if not view.flags.writeable:
        view = writable_alias(view)
    code = _DLPACK_CODES.get(name_of(view.dtype)) if view.dtype.isbuiltin == 2 else None  # of ml_dtypes
    if code is None:
        return view.__dlpack__()
    exported = view.view(f"uint{8 * view.dtype.itemsize}").__dlpack__()
    _code_of(exported).value = code
    return exported


class Importable:
    """A capsule in the form that ``from_dlpack`` functions take, whatever stream they name.

    ``device`` is DLPack's: ``(1, 0)`` for host memory, ``(2, i)`` for a CUDA card.
    """

    def __init__(self, exported: Any, device: tuple[int, int] = (1, 0)) -> None:
        self._exported, self._device = exported, device

    def __dlpack__(self, **_: Any) -> Any:
        return self._exported

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


def from_capsule(exported: Any, dtype: np.dtype[Any]) -> np.ndarray:
    """A NumPy view of what an unversioned capsule of host memory holds, the extended dtypes included.

    NumPy makes it read-only, since such a capsule cannot say that it may be written to.
    """
    if name_of(dtype) in _DLPACK_CODES:
        _code_of(exported).value = _UNSIGNED
    return np.from_dlpack(Importable(exported)).view(dtype)


def from_dlpack(x: Any) -> np.ndarray:
    """`np.from_dlpack` for any producer in host memory, that of the extended dtypes included."""
    try:
        return np.from_dlpack(x)
    except (BufferError, RuntimeError):  # NumPy has no such dtype
        exported = x.__dlpack__()
        return from_capsule(exported, np_dtype(_DLPACK_NAMES[_code_of(exported).value]))
