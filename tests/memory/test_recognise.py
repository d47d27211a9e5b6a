"""Which errors are OOM: the frameworks' own, provoked where the host allows, and no others."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import framework, is_oom_error
from tests.helpers import require, run_script


def raised_by(call: Callable[[], Any]) -> Exception:
    """The error that a call raises."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - whatever it is, is what the test looks at
        return error
    raise AssertionError("nothing was raised")


# -- real ones ---------------------------------------------------------------------------------------


def test_numpy() -> None:
    error = raised_by(lambda: np.empty(1 << 55))
    assert type(error) is not MemoryError
    assert is_oom_error(error)


def test_torch_on_the_host() -> None:
    torch = require("torch")
    error = raised_by(lambda: torch.empty(1 << 55))
    assert type(error) is RuntimeError
    assert is_oom_error(error)


def test_jax() -> None:
    jax = require("jax")
    error = raised_by(lambda: jax.numpy.zeros(1 << 45).block_until_ready())
    assert isinstance(error, jax.errors.JaxRuntimeError)
    assert is_oom_error(error)


def test_tensorflow() -> None:
    tf = require("tensorflow")
    error = raised_by(lambda: tf.zeros([1 << 50]))
    assert isinstance(error, tf.errors.ResourceExhaustedError)
    assert is_oom_error(error)


def test_pyclesperanto() -> None:
    cle = require("pyclesperanto")
    assert is_oom_error(raised_by(lambda: cle.create((1 << 11, 1 << 14, 1 << 14))))


def test_pyopencl() -> None:
    cl = pytest.importorskip("pyopencl")
    context = cl.create_some_context(interactive=False)
    error = raised_by(lambda: cl.Buffer(context, cl.mem_flags.READ_WRITE, 1 << 45))
    assert isinstance(error, cl.Error)
    assert is_oom_error(error)


def test_pyopencl_alone() -> None:
    pytest.importorskip("pyopencl")
    done = run_script("pyopencl_alone.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "False"]


# -- the frameworks' own classes, which only a card raises ---------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "CUDA driver error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
        "cuFFT error: CUFFT_ALLOC_FAILED",
        "HIP error: out of memory",
        "MPS backend out of memory (MPS allocated: 9.05 GB, max allowed: 9.07 GB)",
        "[enforce fail at alloc_cpu.cpp:73] . DefaultCPUAllocator: not enough memory: you tried to",
    ],
)
def test_torch_messages(message: str) -> None:
    torch = require("torch")
    assert is_oom_error(RuntimeError(message))
    if hasattr(torch, "AcceleratorError"):
        assert is_oom_error(torch.AcceleratorError(message))


def test_torch_class() -> None:
    torch = require("torch")
    assert is_oom_error(torch.OutOfMemoryError("anything"))
    assert is_oom_error(torch.cuda.OutOfMemoryError("anything"))


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: device-side assert triggered",
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`",
        "mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)",
        "Storage size calculation overflowed with sizes=[4611686018427387904]",
        "the budget says: CUDA error: out of memory",
        "out of memory budget",
    ],
)
def test_torch_other_messages(message: str) -> None:
    torch = require("torch")
    assert not is_oom_error(RuntimeError(message))
    if hasattr(torch, "AcceleratorError"):
        assert not is_oom_error(torch.AcceleratorError(message))


def test_cupy() -> None:
    cupy = require("cupy")
    runtime, driver = cupy.cuda.runtime, cupy.cuda.driver
    assert is_oom_error(cupy.cuda.memory.OutOfMemoryError(1024, 0))
    assert is_oom_error(runtime.CUDARuntimeError(2))  # cudaErrorMemoryAllocation
    assert not is_oom_error(runtime.CUDARuntimeError(700))  # cudaErrorIllegalAddress
    assert not is_oom_error(runtime.CUDARuntimeError(35))  # cudaErrorInsufficientDriver
    assert not is_oom_error(ValueError("CUBLAS_STATUS_ALLOC_FAILED"))
    assert isinstance(driver.CUDADriverError, type)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.", True),
        ("INTERNAL: Failed to allocate 8589934592 bytes for new constant", True),
        ("INTERNAL: Failed to load in-memory CUBIN: CUDA_ERROR_OUT_OF_MEMORY: out of memory", True),
        ("RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 106496, available: 101376", False),
        ("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered", False),
        ("INVALID_ARGUMENT: Argument does not match host shape", False),
        ("FAILED_PRECONDITION: Buffer Definition Event: Failed to allocate request for 2.0GiB", True),
        ("UNKNOWN: CUDA_ERROR_OUT_OF_MEMORY: out of memory", True),
        ("ABORTED: Out of memory while trying to allocate 1024 bytes.", True),
        ("INVALID_ARGUMENT: out of memory-looking words", False),
        ("INVALID_ARGUMENT: Failed to allocate what nobody can have", False),
        ("NOT_FOUND: no kernel named CUDA_ERROR_OUT_OF_MEMORY", False),
        ("UNIMPLEMENTED: Out of memory handling is not implemented", False),
        ("ALREADY_EXISTS: out of memory handler", False),
        ("PERMISSION_DENIED: Out of memory killer", False),
        ("UNAUTHENTICATED: out of memory", False),
        ("OUT_OF_RANGE: out of memory range", False),
        ("DATA_LOSS: out of memory", False),
    ],
)
def test_jax_messages(message: str, expected: bool) -> None:
    jax = require("jax")
    assert is_oom_error(jax.errors.JaxRuntimeError(message)) is expected
    assert not is_oom_error(ValueError(message))


def test_tensorflow_messages() -> None:
    errors = require("tensorflow").errors
    oom = errors.ResourceExhaustedError(None, None, "OOM when allocating tensor with shape[1]")
    assert is_oom_error(oom)
    copying = (
        "Failed copying input tensor from CPU:0 to GPU:0 in order to run Mul: Dst tensor is not initialized."
    )
    assert is_oom_error(errors.InternalError(None, None, copying))
    too_long = errors.ResourceExhaustedError(None, None, "received message larger than max (5 vs. 4)")
    assert not is_oom_error(too_long)
    assert not is_oom_error(errors.InternalError(None, None, "Blas GEMM launch failed"))
    assert not is_oom_error(errors.InvalidArgumentError(None, None, "Incompatible shapes"))


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            "Error: Failed to allocate buffer memory. OpenCL error: CL_MEM_OBJECT_ALLOCATION_FAILURE (-4)",
            True,
        ),
        ("Error: Failed to allocate image memory. OpenCL error: CL_OUT_OF_RESOURCES (-5)", True),
        ("Error: Failed to execute the kernel. OpenCL error: CL_OUT_OF_HOST_MEMORY (-6)", True),
        ("Error: Failed to execute the kernel. OpenCL error: CL_INVALID_KERNEL_ARGS (-52)", False),
        ("CL_OUT_OF_RESOURCES", False),
    ],
)
def test_opencl_messages(message: str, expected: bool) -> None:
    require("pyclesperanto")
    assert is_oom_error(RuntimeError(message)) is expected


@pytest.mark.parametrize("name", ["numpy", "cupy", "torch", "jax", "tensorflow", "pyclesperanto"])
def test_the_rehearsed_error_is_the_frameworks_own(name: str) -> None:
    if name != "numpy":
        require(name)
    error = framework(name).pool.oom_error()
    assert framework(name).is_oom(error)
    assert is_oom_error(error)


# -- from another process, and without words -----------------------------------------------------------


def test_what_another_process_sends_of_pyopencl() -> None:
    """Its record of the error does not pickle: the class is left, and the words at most."""
    cl = pytest.importorskip("pyopencl")
    context = cl.create_some_context(interactive=False)
    error = raised_by(lambda: cl.Buffer(context, cl.mem_flags.READ_WRITE, 1 << 45))
    sent = pickle.loads(pickle.dumps(type(error)(str(error))))
    assert str(sent) == str(error)
    assert is_oom_error(sent)
    assert is_oom_error(RuntimeError(f"{type(error).__name__}: {error}"))
    assert is_oom_error(cl.MemoryError("create_buffer failed: MEM_OBJECT_ALLOCATION_FAILURE"))
    assert is_oom_error(cl.RuntimeError("clEnqueueNDRangeKernel failed: OUT_OF_RESOURCES"))
    assert is_oom_error(cl.MemoryError())
    assert not is_oom_error(cl.LogicError())
    assert not is_oom_error(cl.LogicError("clSetKernelArg failed: INVALID_ARG_SIZE"))
    assert not is_oom_error(RuntimeError("LogicError: clSetKernelArg failed: INVALID_ARG_SIZE"))


@pytest.mark.parametrize("base", [ValueError, RuntimeError, Exception, OSError, KeyError, MemoryError])
@pytest.mark.parametrize("raised", [RuntimeError, TypeError, MemoryError])
def test_errors_whose_words_cannot_be_had(base: type[Exception], raised: type[Exception]) -> None:
    require("torch")

    def wordless(self: Any) -> str:
        raise raised("no words")

    made: type[Exception] = type("Wordless", (base,), {"__str__": wordless, "__repr__": wordless})
    error = made()
    assert is_oom_error(error) is issubclass(base, MemoryError)

    def fail(x: Any) -> Any:
        raise error

    x = np.ones((4, 2))
    calls: list[Callable[[], Any]] = [
        lambda: arraybridge.run_with_oom_recovery(fail, x),
        lambda: arraybridge.split_and_retry(fail, x),
        lambda: arraybridge.numpy(fail)(x),
        lambda: arraybridge.torch(oom_recovery="split")(fail)(x),
        lambda: arraybridge.Pipeline(fail)(x),
        lambda: list(arraybridge.device_map(fail, [x], ["cpu"])),
    ]
    for call in calls:
        with pytest.raises(made) as caught:
            call()
        assert caught.value is error


# -- through other errors ----------------------------------------------------------------------------


def chained(how: str) -> Exception:
    """A plain error that has something to do with a MemoryError."""

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


def test_chains() -> None:
    assert is_oom_error(chained("cause"))
    assert is_oom_error(chained("context"))
    assert not is_oom_error(chained("from None"))


def test_groups() -> None:
    group = ExceptionGroup("two", [ValueError("shape"), ExceptionGroup("inner", [MemoryError()])])
    assert is_oom_error(group)
    wrapped = RuntimeError("workers failed")
    wrapped.__cause__ = group
    assert is_oom_error(wrapped)
    assert not is_oom_error(ExceptionGroup("one", [ValueError("out of memory")]))


def test_a_chain_that_bites_its_tail_ends() -> None:
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__cause__, second.__cause__ = second, first
    assert not is_oom_error(first)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("out of memory budget"),
        RuntimeError("RESOURCE_EXHAUSTED: quota"),
        OSError(12, "Cannot allocate memory"),
        IndexError("index 5 is out of bounds"),
        KeyboardInterrupt(),
        RecursionError("maximum recursion depth exceeded"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_others(error: BaseException) -> None:
    assert not is_oom_error(error)


def test_no_framework_is_imported() -> None:
    done = run_script("memory_imports_nothing.py")
    assert done.returncode == 0, done.stdout + done.stderr
