"""Page-locked copies of host arrays, from which a GPU copies at full speed."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import numpy as np

from arraybridge import cuda_driver
from arraybridge.advice import Advice
from arraybridge.compilers import run_eagerly
from arraybridge.conversion.convert import convert_memory
from arraybridge.conversion.detection import detect_memory_type
from arraybridge.errors import MemoryConversionError, UnknownArrayError
from arraybridge.host import dtype_names
from arraybridge.interface import registry
from arraybridge.interface.devices import CPU
from arraybridge.interface.framework import Framework
from arraybridge.interface.interchange import c_strides
from arraybridge.interface.unsupported import sparse_array_error
from arraybridge.memory.oom_recognition import is_oom_error
from arraybridge.strides import steps as steps_of

__all__ = ["pinned"]


@run_eagerly
def pinned(x: Any) -> Any:
    """Return a copy of a host array in page-locked memory, from which a GPU copies at full speed.

    Page-locked memory is expensive to allocate: allocate it once and reuse it for many transfers. PyTorch or
    CuPy allocates it, if loaded. ``x`` itself is returned if neither is loaded or there is no CUDA device.

    An asynchronous copy reads the memory later. PyTorch allocates the memory of its own tensors, and of NumPy
    arrays if it is loaded, and keeps it until its copies (``non_blocking=True``) are done. For copies by
    other libraries, such as ``cupy.ndarray.set``, keep the array until the stream was synchronized.

    Args:
        x: An array in host memory: a NumPy array or a PyTorch tensor, of any shape and dtype. JAX and
            TensorFlow arrays are returned unchanged, because those frameworks allocate their own memory.
            Carriers, such as tables and files, and arrays of unknown libraries are also returned unchanged:
            convert them first.

    Returns:
        An array of the same framework, shape, dtype and values.

    Raises:
        UnknownArrayError: If ``x`` is not an array.
        ArrayNotSupportedError: If ``x`` is a sparse array. Pin its parts instead.
        CopyRequiredError: If ``x`` is not in host memory.

    Example:
        >>> import numpy as np
        >>> pinned(np.arange(3))
        array([0, 1, 2])
    """
    owner = registry.find_owner(x)
    if owner is None:
        try:
            detect_memory_type(x)
        except UnknownArrayError as error:
            lengths = x if type(x) is tuple else (x,)
            if all(type(length) is int for length in lengths):
                error.advise(Advice("pinned takes an array, not a shape; pass {}", ("np.empty({x})",)))
            raise
        return x
    if owner.sparse.layout(x):
        raise sparse_array_error(owner, x)
    view = convert_memory(x, "numpy", copy=False)
    if not owner.mutable or not view.nbytes:
        return x
    memory = _page_locked_bytes(owner, view.nbytes)
    if memory is None:
        return x
    target = memory.view(view.dtype).reshape(view.shape)
    np.copyto(target, view)
    return convert_memory(target, owner.name, copy=False)


def _page_locked_bytes(owner: Framework, nbytes: int) -> np.ndarray | None:
    """Return page-locked memory for an array of ``owner``; None if no framework allocates any.

    The framework of the array comes first, because it knows when its own copies are done. Any framework may
    send a NumPy array, so those that wait for copies come next.
    """
    others = sorted(registry.loaded(), key=attrgetter("memory.waits_for_copies"), reverse=True)
    locked = (one.memory.allocate_pinned(nbytes) for one in (owner, *others))
    return next((memory for memory in locked if memory is not None), None)


def page_locked_copy(x: Any, target: Framework) -> Any:
    """Return a copy of a host array in page-locked memory that ``target`` allocates, for one transfer.

    Only plain, dense, C-contiguous NumPy and PyTorch host arrays are copied. The conversion of any other
    array depends on its subclass, gradient or layout, which the copy would not have. Other arrays are
    returned unchanged. So is ``x`` if it is already page-locked or no page-locked memory is available.
    """
    owner = registry.find_owner(x)
    if owner is None or not _is_pageable(owner, x):
        return x
    try:
        memory = target.memory.allocate_pinned(owner.nbytes(x))
    except (MemoryError, RuntimeError) as error:
        if is_oom_error(error):  # the framework can also transfer ``x`` without page-locked memory
            return x
        raise
    if memory is None:
        return x
    locked = owner.batching.reinterpret(memory, owner.shape(x), owner.dtype_name(x))
    locked[...] = x
    return locked


def _is_pageable(owner: Framework, x: Any) -> bool:
    """Return whether `page_locked_copy` copies an array: it is plain, and its memory is not page-locked."""
    # There is no output buffer for JAX and TensorFlow arrays, subclasses, sparse arrays, and tensors that
    # require grad.
    if not owner.mutable or owner.batching.output_buffer(x, (0,)) is None:
        return False
    try:
        owner.check(x)
        _, nbytes, address, device = owner.runtime.observe(x)
        dtype_names.np_dtype(owner.dtype_name(x))  # raises for bfloat16 without ml_dtypes
    except MemoryConversionError:
        return False  # the conversion raises the error, or does not need NumPy's dtype
    if not nbytes or device != CPU or cuda_driver.is_page_locked(address or 0):
        return False
    return _is_plain(owner, x)


def _is_plain(owner: Framework, x: Any) -> bool:
    """Return whether a host array is C-contiguous, and a copy of it has the same strides and bits."""
    # The memory of some arrays, such as PyTorch tensors with the conj bit, does not contain their values.
    if owner.interchange.copy_reason(x):
        return False
    steps = steps_of(owner, x)
    if steps is None:
        return False
    shape, strides, itemsize = steps
    # Not `is_c_contiguous`: PyTorch derives the memory format from strides along axes of length 1, too.
    return strides == c_strides(shape, itemsize)
