"""Out-of-memory errors inside messages of wrappers, and similar texts of other errors."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest

from arraybridge import is_oom_error
from tests.helpers import require

CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 7.80 GiB total capacity)"
HOST = (
    "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"
    " allocate 1099511627776 bytes. Error code 12 (Cannot allocate memory)"
)
NUMPY = "Unable to allocate 8.00 TiB for an array with shape (1099511627776,) and data type float64"
LINES = '  File "model.py", line 7, in forward\n    return x @ w\n           ~ <--- HERE\n'


def torchscript(line: str) -> str:
    return (
        "The following operation failed in the TorchScript interpreter.\n"
        f"Traceback of TorchScript (most recent call last):\n{LINES}{line}\n"
    )


def caught(kind: str, line: str, where: str = "DataLoader worker process 0") -> str:
    return f"Caught {kind} in {where}.\nOriginal Traceback (most recent call last):\n{LINES}{line}\n"


def keras(text: str, arguments: bool = True) -> str:
    shown = "\n\nArguments received by Big.call():\n  • x=torch.Tensor(shape=torch.Size([2, 2]))"
    return (
        f"Exception encountered when calling Big.call().\n\n\x1b[1m{text}\x1b[0m{shown if arguments else ''}"
    )


def callback(line: str) -> str:
    return (
        "INTERNAL: CpuCallback error calling callback: Traceback (most recent call last):\n"
        f"{LINES}{line}\n\nAt:\n  callback.py(12): call\n"
    )


def made(name: str, cls: str, text: str) -> Exception:
    """Create an exception of a framework's class, or a built-in one."""
    module = require(name)
    if name == "tensorflow" and cls != "RuntimeError":
        error: Exception = getattr(module.errors, cls)(None, None, text)
    elif cls == "JaxRuntimeError":
        error = module.errors.JaxRuntimeError(text)
    elif cls == "OutOfMemoryError":
        error = module.OutOfMemoryError(text)
    else:
        error = RuntimeError(text)
    return error


ALLOCATOR = (
    'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":1131, please report'
)
COPYING = (
    "Failed copying input tensor from /job:localhost/replica:0/task:0/device:CPU:0 to"
    " /job:localhost/replica:0/task:0/device:GPU:0 in order to run AddV2: Status: out of memory"
)
RET_CHECK = "RET_CHECK failure (gpu_compiler.cc:626) Out of memory while trying to allocate 17179869184 bytes"
SOLVER = "solver_handle_pool.cc:37: operation gpusolverDnCreate(&handle) failed: cuSolver allocation failed"

OUT_OF_MEMORY = [
    ("torch", "RuntimeError", torchscript(f"RuntimeError: {CUDA}")),
    ("torch", "RuntimeError", torchscript(f"torch.OutOfMemoryError: {CUDA}")),
    ("torch", "RuntimeError", torchscript(f"RuntimeError: {HOST}")),
    ("torch", "RuntimeError", caught("RuntimeError", f"RuntimeError: {HOST}")),
    (
        "torch",
        "RuntimeError",
        caught("RuntimeError", f"RuntimeError: {CUDA}", "pin memory thread for device 0"),
    ),
    ("torch", "RuntimeError", caught("MemoryError", f"numpy._core._exceptions._ArrayMemoryError: {NUMPY}")),
    ("torch", "RuntimeError", caught("MemoryError", "MemoryError")),
    ("torch", "RuntimeError", caught("OSError", "OSError: [Errno 12] Cannot allocate memory")),
    (
        "torch",
        "RuntimeError",
        caught("OutOfMemoryError", f"torch.OutOfMemoryError: {CUDA}", "replica 0 on device 0"),
    ),
    ("torch", "OutOfMemoryError", "Caught OutOfMemoryError in replica 0 on device 0.\n"),
    ("torch", "RuntimeError", "Caught OutOfMemoryError in replica 0 on device 0.\n"),
    ("torch", "RuntimeError", caught("RuntimeError", f"RuntimeError: {keras(CUDA)}")),
    ("torch", "RuntimeError", keras(caught("RuntimeError", f"RuntimeError: {CUDA}"))),
    ("torch", "RuntimeError", ALLOCATOR),
    (
        "torch",
        "RuntimeError",
        "Native API failed. Native API returns: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
    ),
    (
        "torch",
        "RuntimeError",
        "Native API failed. Native API returns: 38 (UR_RESULT_ERROR_OUT_OF_HOST_MEMORY)",
    ),
    ("torch", "RuntimeError", "Native API failed. Native API returns: -6 (PI_ERROR_OUT_OF_HOST_MEMORY)"),
    ("torch", "RuntimeError", "Invalid buffer size: 19.38 GiB"),
    ("torch", "RuntimeError", "Triton Error [CUDA]: out of memory"),
    ("torch", "RuntimeError", "Triton Error [HIP]:  Code: 2, Messsage: out of memory"),
    ("torch", "RuntimeError", "CUDA error: resource allocation failed when calling cusparseCreate(handle)"),
    ("torch", "RuntimeError", "CUDA error: resource allocation failed when calling `cusparseCreate(handle)`"),
    ("torch", "RuntimeError", "CUSPARSE_STATUS_INSUFFICIENT_RESOURCES when calling cusparseSpMM"),
    (
        "torch",
        "RuntimeError",
        "unable to mmap 1073741824 bytes from file </w.pt>: Cannot allocate memory (12)",
    ),
    ("torch", "RuntimeError", keras(CUDA)),
    ("torch", "RuntimeError", keras(CUDA, arguments=False)),
    ("torch", "OutOfMemoryError", keras(CUDA)),
    ("numpy", "RuntimeError", keras(NUMPY)),
    ("tensorflow", "ResourceExhaustedError", keras("OOM when allocating tensor with shape[8,8]")),
    ("tensorflow", "RuntimeError", keras("{{function_node f}} OOM when allocating tensor with shape[8,8]")),
    ("tensorflow", "InternalError", COPYING),
    ("tensorflow", "InternalError", keras(COPYING)),
    ("tensorflow", "InternalError", RET_CHECK),
    (
        "tensorflow",
        "UnknownError",
        "Failed to get convolution algorithm: CUDNN_STATUS_ALLOC_FAILED at dnn.cc:1",
    ),
    ("tensorflow", "ResourceExhaustedError", "failed to allocate memory [Op:Mul]"),
    ("tensorflow", "ResourceExhaustedError", "/mnt/shm/x; Cannot allocate memory"),
    ("tensorflow", "UnknownError", f"RuntimeError: {HOST}\nTraceback (most recent call last):\n{LINES}"),
    ("jax", "JaxRuntimeError", keras("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes.")),
    ("jax", "RuntimeError", keras("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes.")),
    ("jax", "JaxRuntimeError", callback(f"MemoryError: {NUMPY}")),
    ("jax", "JaxRuntimeError", callback(f"numpy._core._exceptions._ArrayMemoryError: {NUMPY}")),
    (
        "jax",
        "JaxRuntimeError",
        f"INTERNAL: CpuCallback error calling callback: Traceback …: MemoryError: {NUMPY}",
    ),
    (
        "jax",
        "JaxRuntimeError",
        f"INTERNAL: Generated function failed: CpuCallback error: MemoryError: {NUMPY}",
    ),
    ("jax", "JaxRuntimeError", f"INTERNAL: {SOLVER}"),
    ("jax", "JaxRuntimeError", SOLVER),
    (
        "jax",
        "JaxRuntimeError",
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm.",
    ),
    ("jax", "JaxRuntimeError", "RESOURCE_EXHAUSTED: Attempting to allocate 1.00G. That was not possible."),
]
OTHER_RESOURCES = [
    "/data/x.tfrecord; Disk quota exceeded",
    "/data/x.tfrecord; No space left on device",
    "/data/memory/x.tfrecord; Too many open files",
    "Too many open files in system",
    "Received message larger than max (21337283 vs. 4194304)",
    "CLIENT: Sent message larger than max (21337283 vs. 4194304)",
    "Quota exceeded for quota metric 'Read requests'",
    "Ran out of memory in memory space vmem. Used 20.50M of 16.00M vmem.",
    "Ran out of memory in memory space smem.",
    "Shared memory size limit exceeded: requested 106496, available: 101376",
]
NOT_OUT_OF_MEMORY = [
    *(("tensorflow", "ResourceExhaustedError", text) for text in OTHER_RESOURCES),
    *(("tensorflow", "ResourceExhaustedError", keras(text)) for text in OTHER_RESOURCES[:2]),
    *(("jax", "JaxRuntimeError", f"RESOURCE_EXHAUSTED: {text}") for text in OTHER_RESOURCES),
    ("jax", "RuntimeError", keras(f"RESOURCE_EXHAUSTED: {OTHER_RESOURCES[0]}")),
    ("jax", "JaxRuntimeError", callback(f"ValueError: {CUDA.lower()}")),
    ("jax", "JaxRuntimeError", callback("KeyError: 'out of memory'")),
    ("torch", "RuntimeError", torchscript("RuntimeError: the size of tensor a (3) must match")),
    ("torch", "RuntimeError", torchscript(f"builtins.ValueError: {CUDA}")),
    ("torch", "RuntimeError", torchscript(f"RuntimeError: the budget says: {CUDA}")),
    ("torch", "RuntimeError", caught("ValueError", f"ValueError: {CUDA}")),
    ("torch", "RuntimeError", caught("AssertionError", f"AssertionError: {CUDA}")),
    ("torch", "RuntimeError", caught("RuntimeError", f"ValueError: {CUDA}", "replica 0 on device 0")),
    ("torch", "RuntimeError", caught("OSError", "OSError: [Errno 24] Too many open files")),
    ("torch", "RuntimeError", keras("mat1 and mat2 shapes cannot be multiplied")),
    ("torch", "RuntimeError", f"the budget says: {keras(CUDA)}"),
    ("torch", "RuntimeError", "Triton Error [CUDA]: an illegal memory access was encountered"),
    ("torch", "RuntimeError", "Triton Error [HIP]:  Code: 700, Messsage: an illegal memory access"),
    ("torch", "RuntimeError", "unable to mmap 16 bytes from file </w.pt>: No such device (19)"),
    ("torch", "RuntimeError", "Native API failed. Native API returns: 20 (UR_RESULT_ERROR_DEVICE_LOST)"),
    ("torch", "RuntimeError", "Invalid buffer: size"),
    ("tensorflow", "InternalError", "RET_CHECK failure (gpu_compiler.cc:626) shape mismatch"),
    ("tensorflow", "UnknownError", "CUDNN_STATUS_EXECUTION_FAILED"),
    ("tensorflow", "UnknownError", f"ValueError: {CUDA}\nTraceback (most recent call last):\n{LINES}"),
    ("tensorflow", "NotFoundError", "OOM when allocating tensor"),
]


@pytest.mark.parametrize(("name", "cls", "text"), OUT_OF_MEMORY)
def test_out_of_memory(name: str, cls: str, text: str) -> None:
    assert is_oom_error(made(name, cls, text))
    chained = LookupError("step 3 failed")
    chained.__cause__ = made(name, cls, text)
    assert is_oom_error(chained)
    for other in (ValueError, KeyError, AssertionError):
        assert not is_oom_error(other(text))


@pytest.mark.parametrize(("name", "cls", "text"), NOT_OUT_OF_MEMORY)
def test_not_out_of_memory(name: str, cls: str, text: str) -> None:
    assert not is_oom_error(made(name, cls, text))


def test_enomem_is_out_of_memory() -> None:
    assert is_oom_error(OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)))
    assert not is_oom_error(OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)))


class RayTaskError(Exception):
    """Ray's exception class, with the interface that is used here."""

    def __init__(self, cause: Any) -> None:
        super().__init__("ray::f() (pid=12, ip=10.0.0.1)\n  File 'f.py', line 3, in f")
        self.cause = cause


def test_ray() -> None:
    require("torch")
    assert is_oom_error(RayTaskError(MemoryError()))
    assert is_oom_error(RayTaskError(RayTaskError(RuntimeError(CUDA))))
    assert not is_oom_error(RayTaskError(ValueError(CUDA)))
    assert not is_oom_error(RayTaskError("MemoryError"))
    dual = type("RayTaskError(ValueError)", (RayTaskError, ValueError), {})
    assert is_oom_error(dual(MemoryError()))
    first = RayTaskError(None)
    second = RayTaskError(first)
    first.cause = second
    assert not is_oom_error(first)
    other = RuntimeError("failed")
    other.cause = MemoryError()  # type: ignore[attr-defined]
    assert not is_oom_error(other), "only Ray's errors store the original error in this attribute"


def test_unreadable_causes_are_ignored() -> None:
    def fail(self: Any) -> Any:
        raise KeyError("cause")

    unreadable = type("RayTaskError", (Exception,), {"cause": property(fail), "__str__": fail})
    assert not is_oom_error(unreadable())


def test_a_real_torchscript_error() -> None:
    torch = require("torch")
    unit = torch.jit.CompilationUnit("def large(x):\n    return x.repeat(35184372088832)\n")
    with pytest.raises(RuntimeError) as caught_error:
        unit.large(torch.ones(2))
    assert "TorchScript" in str(caught_error.value)
    assert is_oom_error(caught_error.value)
