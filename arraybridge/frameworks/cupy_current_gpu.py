"""Selection of CuPy's current GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import cupy

from arraybridge.frameworks import cuda_driver

__all__ = ["on_gpu"]


@contextmanager
def on_gpu(index: int) -> Iterator[None]:
    """Return a context manager that makes a GPU the current device of this thread.

    `cupy.cuda.Device` does the same. But with CUDA 12 and later, it creates a context on the GPU that it
    restores, so a process that uses only the second GPU would also hold memory on the first.
    """
    runtime = cupy.cuda.runtime
    before = runtime.getDevice()
    if before == index:
        yield
    elif runtime.is_hip or cuda_driver.has_context(before):
        with cupy.cuda.Device(index):
            yield
    else:
        try:
            with cuda_driver.primary_context(index):
                yield
        finally:
            if runtime.getDevice() != before:
                runtime.setDevice(before)
