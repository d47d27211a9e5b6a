"""Recognition of out-of-memory errors: real ones, provoked if the host allows it, and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import framework, is_oom_error
from tests.helpers import require


def raised_by(call: Callable[[], Any]) -> Exception:
    """Return the exception that a call raises."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the test inspects any exception
        return error
    raise AssertionError("nothing was raised")


# -- real errors -------------------------------------------------------------------------------------

TOO_MUCH: dict[str, Callable[[Any], Any]] = {
    "numpy": lambda np: np.empty(1 << 55),
    "torch": lambda torch: torch.empty(1 << 55),
    "jax": lambda jax: jax.numpy.zeros(1 << 45).block_until_ready(),
    "tensorflow": lambda tf: tf.zeros([1 << 50]),
    "pyclesperanto": lambda cle: cle.create((1 << 11, 1 << 14, 1 << 14)),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_real_failures(name: str) -> None:
    module = require(name)
    assert is_oom_error(raised_by(lambda: TOO_MUCH[name](module)))


@pytest.mark.parametrize("name", ["numpy", "cupy", "torch", "jax", "tensorflow", "pyclesperanto"])
def test_simulated_error_is_the_frameworks_own(name: str) -> None:
    require(name)
    error = framework(name).memory.oom_error()
    assert framework(name).memory.is_oom(error)
    assert is_oom_error(error)


# -- errors that only a GPU raises ---------------------------------------------------------------------

MESSAGES = [
    ("torch", "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported", True),
    ("torch", "CUDA driver error: out of memory", True),
    ("torch", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
    ("torch", "cuDNN error: CUDNN_STATUS_ALLOC_FAILED", True),
    ("torch", "cuFFT error: CUFFT_ALLOC_FAILED", True),
    ("torch", "HIP error: out of memory", True),
    ("torch", "MPS backend out of memory (MPS allocated: 9.05 GB, max allowed: 9.07 GB)", True),
    ("torch", "[enforce fail at alloc_cpu.cpp:73] . DefaultCPUAllocator: not enough memory: you tried", True),
    ("torch", "CUDA error: an illegal memory access was encountered", False),
    ("torch", "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`", False),
    ("torch", "the budget says: CUDA error: out of memory", False),
    ("jax", "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.", True),
    ("jax", "INTERNAL: Failed to allocate 8589934592 bytes for new constant", True),
    ("jax", "INTERNAL: Failed to load in-memory CUBIN: CUDA_ERROR_OUT_OF_MEMORY: out of memory", True),
    ("jax", "FAILED_PRECONDITION: Buffer Definition Event: Failed to allocate request for 2.0GiB", True),
    ("jax", "RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 106496, available: 101", False),
    ("jax", "INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered", False),
    ("jax", "INVALID_ARGUMENT: Failed to allocate an impossible size", False),
    ("pyclesperanto", "Error: Failed. OpenCL error: CL_MEM_OBJECT_ALLOCATION_FAILURE (-4)", True),
    ("pyclesperanto", "Error: Failed to execute. OpenCL error: CL_OUT_OF_HOST_MEMORY (-6)", True),
    (
        "pyclesperanto",
        "Error: Failed to execute. OpenCL error: CL_INVALID_KERNEL_ARGS (-52)",
        False,
    ),
]


@pytest.mark.parametrize(("name", "message", "expected"), MESSAGES)
def test_messages(name: str, message: str, expected: bool) -> None:
    module = require(name)
    error = module.errors.JaxRuntimeError(message) if name == "jax" else RuntimeError(message)
    assert is_oom_error(error) is expected
    assert not is_oom_error(ValueError(message))
    if name == "torch" and hasattr(module, "AcceleratorError"):
        assert is_oom_error(module.AcceleratorError(message)) is expected


def test_only_exceptions_are_accepted() -> None:
    with pytest.raises(TypeError, match="expected an exception, got str"):
        is_oom_error("out of memory")  # type: ignore[arg-type]


def test_cupy() -> None:
    cupy = require("cupy")
    error = cupy.cuda.runtime.CUDARuntimeError
    assert is_oom_error(cupy.cuda.memory.OutOfMemoryError(1024, 0))
    assert is_oom_error(error(2))  # cudaErrorMemoryAllocation
    assert not is_oom_error(error(700))  # cudaErrorIllegalAddress
    assert not is_oom_error(error(35))  # cudaErrorInsufficientDriver


def test_tensorflow() -> None:
    errors = require("tensorflow").errors
    copying = (
        "Failed copying input tensor from CPU:0 to GPU:0 in order to run Mul: Dst tensor is not initialized."
    )
    for made, expected in (
        (errors.ResourceExhaustedError(None, None, "OOM when allocating tensor with shape[1]"), True),
        (errors.InternalError(None, None, copying), True),
        (errors.ResourceExhaustedError(None, None, "received message larger than max (5 vs. 4)"), False),
        (errors.InternalError(None, None, "Blas GEMM launch failed"), False),
    ):
        assert is_oom_error(made) is expected


# -- wrapped errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [ValueError, RuntimeError, MemoryError])
def test_errors_whose_text_raises(base: type[Exception]) -> None:
    require("torch")

    def textless(self: Any) -> str:
        raise TypeError("no words")

    made: type[Exception] = type("Wordless", (base,), {"__str__": textless, "__repr__": textless})
    error = made()
    assert is_oom_error(error) is issubclass(base, MemoryError)

    def fail(x: Any) -> Any:
        raise error

    for options in ({}, {"split": True}):
        with pytest.raises(made) as caught:
            arraybridge.run_with_oom_recovery(fail, np.ones((4, 2)), **options)  # type: ignore[arg-type]
        assert caught.value is error


def chained(how: str) -> Exception:
    """Return an ordinary exception that is chained to a MemoryError."""

    def fail() -> None:
        try:
            np.empty(1 << 55)
        except MemoryError as error:
            if how == "cause":
                raise RuntimeError("step 3 failed") from error
            if how == "from None":
                raise RuntimeError("step 3 failed") from None
            raise RuntimeError("step 3 failed")  # noqa: B904 - the context is the point

    return raised_by(fail)


def test_chains_and_groups() -> None:
    assert is_oom_error(chained("cause"))
    assert is_oom_error(chained("context"))
    assert not is_oom_error(chained("from None"))
    group = ExceptionGroup("two", [ValueError("shape"), ExceptionGroup("inner", [MemoryError()])])
    wrapped = RuntimeError("workers failed")
    wrapped.__cause__ = group
    assert is_oom_error(wrapped)
    assert not is_oom_error(ExceptionGroup("one", [ValueError("out of memory")]))
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__cause__, second.__cause__ = second, first  # a cycle of exceptions
    assert not is_oom_error(first)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("out of memory budget"),
        RuntimeError("RESOURCE_EXHAUSTED: quota"),
        OSError(24, "Too many open files"),
        OSError(28, "No space left on device"),
        OSError("Cannot allocate memory"),
        KeyboardInterrupt(),
        RecursionError("maximum recursion depth exceeded"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_others(error: BaseException) -> None:
    assert not is_oom_error(error)
