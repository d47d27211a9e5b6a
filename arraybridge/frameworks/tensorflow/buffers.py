"""Who else holds the memory of a tensor of TensorFlow: other tensors, variables, constants, NumPy."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import tensorflow as tf

__all__ = ["is_shared"]

#: Where what is read here was looked up, and tried. Elsewhere nobody can tell.
_KNOWN = ("2.19", "2.20", "2.21")

# TensorFlow counts the holders of a buffer, and has no question for it. DLPack's struct leads there:
# DLManagedTensor.manager_ctx -> TensorReference.buf_ -> TensorBuffer {vtable, ref_, data_}
# (tensorflow/c/eager/dlpack.cc, tensorflow/core/framework/tensor_reference.h, tensor.h).
_OFFSET_OF_CONTEXT = 48
_OFFSET_OF_COUNT, _OFFSET_OF_DATA = 8, 16
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def is_shared(x: Any) -> bool:
    """Whether anybody but ``x`` holds its memory; True where nobody can tell.

    Who looked at it through Python's buffer protocol counts for as long as ``x`` lives. What TensorFlow was
    lent by another framework has a buffer of its own, which tells nothing of who else holds that memory.
    """
    alone, two = _holders_of_one_and_two()
    if alone == 0 or _holders(x) != alone:
        return True
    # Of the beginning of a larger buffer, as the first of `tf.split`, the larger one is counted, and one more
    # of this one does not show.
    other = tf.raw_ops.Identity(input=x)
    return _holders(x) != two or other is x


def _holders(x: Any) -> int:
    """How many hold the buffer of a tensor, DLPack with it; 0 where that cannot be told."""
    if not (x.dtype.is_floating or x.dtype.is_complex or x.dtype.is_integer or x.dtype.is_bool):
        return 0  # strings would end the process
    try:
        capsule = tf.experimental.dlpack.to_dlpack(x)
    except (tf.errors.OpError, ValueError, TypeError, RuntimeError, BufferError):
        return 0  # DLPack lacks the dtype
    address = _pointer(capsule, b"dltensor")
    buffer = _word(_word(address + _OFFSET_OF_CONTEXT))
    if not buffer or _word(buffer + _OFFSET_OF_DATA) != _word(address):
        return 0  # it is empty, or this is another struct than it was
    return ctypes.c_int32.from_address(buffer + _OFFSET_OF_COUNT).value


def _word(address: int) -> int:
    return ctypes.c_void_p.from_address(address).value or 0


@cache
def _holders_of_one_and_two() -> tuple[int, int]:
    """What `_holders` says of a tensor by itself, and with another one in its memory; zeros if nothing."""
    if not tf.__version__.startswith(_KNOWN):
        return 0, 0
    x = tf.constant([1.0, 2.0]) * 2.0
    alone = _holders(x)
    other = tf.raw_ops.Identity(input=x)
    two = _holders(x)
    return (alone, two) if _holders(other) == two > alone > 0 else (0, 0)
