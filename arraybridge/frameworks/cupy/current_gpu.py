"""Selection of CuPy's current GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from threading import Thread

import cupy

from arraybridge import cuda_driver

__all__ = ["on_gpu"]


@contextmanager
def on_gpu(index: int) -> Iterator[None]:
    """Return a context manager that makes a GPU the current device of this thread.

    `cupy.cuda.Device` does the same. But with CUDA 12 and later, it creates a context on the GPU that it
    restores (pytorch/pytorch#94864), so a process that uses only the second GPU would also hold memory on the
    first. Here, that happens only if the code in the block calls cudaSetDevice, whose effect outlasts the
    pushed context.
    """
    runtime = cupy.cuda.runtime
    before = runtime.getDevice()
    if before == index:
        yield
    elif runtime.is_hip or cuda_driver.has_context(before):
        with cupy.cuda.Device(index):
            yield
    else:
        _read_compute_capability(index)
        try:
            with cuda_driver.primary_context(index):
                yield
        finally:
            if runtime.getDevice() != before:
                runtime.setDevice(before)


@cache
def _read_compute_capability(index: int) -> None:
    """Make CuPy read and cache the compute capability of a GPU, for which it calls cudaSetDevice (CuPy 14.2).

    This happens in another thread, because cudaSetDevice affects only the thread that calls it.
    """

    def read() -> None:
        # The calling thread opens the GPU next, and reports an error.
        with suppress(RuntimeError), cuda_driver.primary_context(index):
            cupy.cuda.Device(index).compute_capability  # noqa: B018  # CuPy caches the value

    thread = Thread(target=read, name="arraybridge-compute-capability")
    thread.start()
    thread.join()
