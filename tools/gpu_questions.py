"""Check assumptions about GPUs that neither documentation nor emulation can confirm.

``python tools/gpu_questions.py [OUT.json]`` runs every question that the installed frameworks allow, and
prints its answer. It skips questions that OUT.json answers, so that it can go on after one that hung. The
answer is ``yes`` if the assumption holds, ``no`` if not, or an observed value.
Questions that cannot run are reported as ``not applicable``.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import numpy as np

import arraybridge
from arraybridge import hardware

EMULATED = bool(os.environ.get("ARRAYBRIDGE_EMULATED_GPU"))
FRAMEWORKS = ("cupy", "torch", "jax")
N = 1 << (12 if EMULATED else 20)
#: The answer of a question while it runs. It remains if the question hangs or crashes the process.
UNFINISHED = "raised no answer: it hung, or crashed the process"


class NotApplicableError(Exception):
    """The error of a question whose frameworks or GPUs are missing."""


def module(name: str) -> Any:
    """Import a framework.

    Raises:
        NotApplicableError: If it cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise NotApplicableError(str(error)) from error


def on_gpu(name: str, value: float) -> Any:
    """Return an array of N equal values on the first GPU."""
    host = np.full(N, value, np.float32)
    if name == "cupy":
        return module("cupy").asarray(host)
    if name == "torch":
        return module("torch").from_numpy(host).cuda()
    jax = module("jax")
    return jax.device_put(host, jax.devices("gpu")[0])


def delay(name: str) -> None:
    """Keep the current stream of a framework busy for tens of milliseconds."""
    if EMULATED:  # work is late there without a delay
        return
    if name == "torch":
        module("torch").cuda._sleep(100_000_000)
    elif name == "cupy":
        cupy = module("cupy")
        busy = cupy.zeros(1 << 24, np.float32)
        for _ in range(200):
            busy += 1
    else:
        jax = module("jax")
        x = jax.device_put(np.zeros((2048, 2048), np.float32), jax.devices("gpu")[0])
        for _ in range(20):
            x = x @ x


def yes_or_no(right: bool) -> str:
    return "yes" if right else "no"


def jax_waits_for_a_side_stream_of_torch() -> str:
    """Check whether JAX waits for pending work on a side stream of PyTorch."""
    torch, jax = module("torch"), module("jax")
    x = torch.zeros(N, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        delay("torch")
        x.fill_(3)
        y = jax.dlpack.from_dlpack(x)
    return yes_or_no(bool((np.asarray(y) == 3).all()))


def lifetime(source: str, target: str) -> Callable[[], str]:
    """Return a question about memory of the source that only pending work of the target reads."""

    def ask() -> str:
        for name in (source, target):
            module(name)
        wrong = 0
        for _ in range(10):
            x = on_gpu(source, 3)
            y = arraybridge.convert_memory(x, target)
            delay(target)
            z = y * 1
            del x, y
            overwritten = [on_gpu(source, -1) for _ in range(4)]
            wrong += not bool((arraybridge.to_numpy(z) == 3).all())
            del overwritten
        return yes_or_no(wrong == 0)

    ask.__doc__ = f"Check whether {target} reads freed memory of {source} before it is reused."
    return ask


def numpy_of_a_jax_array() -> str:
    """Report the flags and base of np.asarray of a JAX array on a GPU."""
    module("jax")
    x = on_gpu("jax", 3)
    found = np.asarray(x)
    return (
        f"owndata={found.flags.owndata}, writeable={found.flags.writeable}, base={type(found.base).__name__}"
    )


def a_jax_array_on_a_gpu_refuses_the_buffer_protocol() -> str:
    """Check whether memoryview of a JAX array on a GPU raises BufferError."""
    module("jax")
    try:
        memoryview(on_gpu("jax", 3))
    except BufferError:
        return "yes"
    return "no"


def unusual(source: str, target: str) -> Callable[[], str]:
    """Return a question about conversions of empty, 0-d and transposed arrays."""

    def ask() -> str:
        for name in (source, target):
            module(name)
        failed = []
        shapes = {
            "empty": np.zeros((0, 3)),
            "0-d": np.array(2.5),
            "transposed": np.arange(12.0).reshape(3, 4).T,
        }
        for name, host in shapes.items():
            there = arraybridge.convert_memory(host, source, 0)
            back = arraybridge.to_numpy(arraybridge.convert_memory(there, target))
            if back.shape != host.shape or not np.array_equal(back, host):
                failed.append(name)
        return "yes" if not failed else f"no: {', '.join(failed)}"

    ask.__doc__ = f"Check conversions of empty, 0-d and transposed arrays from {source} to {target}."
    return ask


def float8_arrives() -> str:
    """Check whether conversions of float8 and bfloat16 to JAX and back preserve all bits."""
    torch, _ = module("torch"), module("jax")
    right = True
    for dtype in (torch.float8_e4m3fn, torch.bfloat16):
        x = torch.arange(16, device="cuda", dtype=torch.float32).to(dtype)
        back = arraybridge.to_torch(arraybridge.to_jax(x))
        right &= torch.equal(back.view(torch.uint8), x.view(torch.uint8))
    return yes_or_no(right)


def from_gpu_to_gpu() -> str:
    """Check whether arrays of every framework convert to the second GPU."""
    if len(hardware.gpus()) < 2:
        raise NotApplicableError("there is only one GPU")
    wrong = []
    for name in FRAMEWORKS:
        with suppress(NotApplicableError):
            module(name)
            y = arraybridge.convert_memory(on_gpu(name, 3), name, 1)
            if arraybridge.device_of(y) != "gpu:1" or not (arraybridge.to_numpy(y) == 3).all():
                wrong.append(name)
    return "yes" if not wrong else f"no: {', '.join(wrong)}"


def work_on_one_gpu_opens_no_other() -> str:
    """Report whether a process that uses only the last GPU creates a context on the first."""
    cupy = module("cupy")
    last = cupy.cuda.runtime.getDeviceCount() - 1
    if last < 1:
        raise NotApplicableError("there is only one GPU")
    code = (
        "import ctypes, numpy as np, arraybridge, cupy\n"
        f"arraybridge.to_cupy(np.zeros(3), {last})\n"
        f"arraybridge.cupy(gpu_id={last})(lambda x: x + 1)(np.zeros(3))\n"
        "state = ctypes.CDLL('libcuda.so.1').cuDevicePrimaryCtxGetState\n"
        "flags, active = ctypes.c_uint(), ctypes.c_int()\n"
        "state(0, ctypes.byref(flags), ctypes.byref(active))\n"
        "print(active.value, cupy.cuda.runtime.getDevice())\n"
    )
    opened, current = output_of(code).split()
    return f"{'no' if opened == '0' else 'yes'}; the current GPU afterwards is {current} (it was 0)"


def host_calls_open_no_gpu() -> str:
    """Check that calls which use only the host create no GPU context."""
    code = (
        "import ctypes, numpy as np, arraybridge\n"
        "arraybridge.devices(); arraybridge.device_info(); arraybridge.memory_stats()\n"
        "arraybridge.free_memory(); arraybridge.least_used_gpu()\n"
        "state = ctypes.CDLL('libcuda.so.1').cuDevicePrimaryCtxGetState\n"
        "flags, active = ctypes.c_uint(), ctypes.c_int()\n"
        "print(state(0, ctypes.byref(flags), ctypes.byref(active)) == 0 and active.value == 1)\n"
    )
    return yes_or_no(output_of(code) == "False")


def memory_stays_until_an_asynchronous_copy_is_done() -> str:
    """Check whether pinned memory stays until the asynchronous copies of PyTorch have read it."""
    torch, _ = module("torch"), module("cupy")
    results = []
    for value in range(20):
        x = arraybridge.pinned(torch.full((N,), float(value)))
        delay("torch")
        y = x.to("cuda", non_blocking=True)
        del x
        overwritten = arraybridge.pinned(torch.full((N,), -1.0))
        results.append(bool((y == value).all()))
        del overwritten
    return yes_or_no(all(results))


def the_device_after_a_pushed_context() -> str:
    """Report the current device after the last GPU's context was pushed, selected again, and popped."""
    cupy = module("cupy")
    last = cupy.cuda.runtime.getDeviceCount() - 1
    code = (
        "import cupy\n"
        "from arraybridge import cuda_driver\n"
        "runtime = cupy.cuda.runtime\n"
        f"with cuda_driver.primary_context({last}): inside = runtime.getDevice()\n"
        "after = runtime.getDevice()\n"
        f"with cuda_driver.primary_context({last}): runtime.setDevice({last})\n"
        "print(inside, after, runtime.getDevice(), cuda_driver.has_context(0))\n"
    )
    inside, after, later, is_open = output_of(code).split()
    return f"inside {inside}, after {after}, after cudaSetDevice {later}, GPU 0 is open: {is_open}"


def an_import_may_be_dropped_during_a_capture() -> str:
    """Check whether an import that is dropped while a CUDA graph is captured leaves the graph intact."""
    cupy, torch = module("cupy"), module("torch")
    x = torch.zeros(N, device="cuda")
    imported = [arraybridge.to_cupy(torch.ones(N, device="cuda"))]
    y = cupy.zeros(N, np.float32) + 1
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        y += 1
        imported.clear()
        graph = stream.end_capture()
        graph.launch(stream)
    stream.synchronize()
    arraybridge.free_memory()
    return yes_or_no(float(y[0]) == 2 and float(x[0]) == 0)


def jax_works_without_its_cpu_backend() -> str:
    """Check conversions between NumPy, PyTorch and JAX with JAX_PLATFORMS=cuda."""
    module("jax")
    code = (
        "import numpy as np, arraybridge as ab\n"
        "x = np.arange(6.0)\n"
        "y = ab.to_jax(x)\n"
        "z = ab.to_jax(x, 0)\n"
        "print(ab.device_of(y), ab.device_of(z), y.dtype, (ab.to_numpy(y) == x).all())\n"
    )
    printed = output_of(code, JAX_PLATFORMS="cuda")
    return "yes" if printed == "gpu:0 gpu:0 float64 True" else f"no: {printed}"


def tensorflow_uses_physical_numbers() -> str:
    """Check the number of the last GPU in TensorFlow if it is the only visible one."""
    tf = module("tensorflow")
    last = len(tf.config.list_physical_devices("GPU")) - 1
    if last < 0:
        raise NotApplicableError("TensorFlow finds no GPU")
    code = (
        "import numpy as np, tensorflow as tf, arraybridge as ab\n"
        f"tf.config.set_visible_devices(tf.config.list_physical_devices('GPU')[{last}:], 'GPU')\n"
        f"x = ab.to_tensorflow(np.ones(3, np.float32), {last})\n"
        "print(ab.device_of(x), x.device[-5:], ab.to_numpy(x).sum())\n"
    )
    printed = output_of(code)
    return "yes" if printed == f"gpu:{last} GPU:0 3.0" else f"no: {printed}"


def output_of(code: str, **variables: str) -> str:
    """Return the output of a new process that runs the code within a minute."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, **variables},
    )
    if done.returncode:
        raise RuntimeError(done.stderr.rstrip()[-1500:])
    return done.stdout.strip()


PAIRS = [(a, b) for a in FRAMEWORKS for b in FRAMEWORKS if a != b]
QUESTIONS: list[Callable[[], str]] = [
    jax_waits_for_a_side_stream_of_torch,
    *(lifetime(*pair) for pair in PAIRS),
    numpy_of_a_jax_array,
    a_jax_array_on_a_gpu_refuses_the_buffer_protocol,
    *(unusual(*pair) for pair in PAIRS),
    float8_arrives,
    memory_stays_until_an_asynchronous_copy_is_done,
    the_device_after_a_pushed_context,
    an_import_may_be_dropped_during_a_capture,
    jax_works_without_its_cpu_backend,
    tensorflow_uses_physical_numbers,
    from_gpu_to_gpu,
    work_on_one_gpu_opens_no_other,
    host_calls_open_no_gpu,
]


def main() -> int:
    """Run all questions that the file has no answer to, and return the number of those that raised."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    answers = json.loads(path.read_text()) if path is not None and path.exists() else {}
    broken = 0
    for question in QUESTIONS:
        text = (question.__doc__ or "").strip()
        if text in answers:
            continue
        answers[text] = UNFINISHED
        _write(path, answers)
        try:
            answer = question()
        except NotApplicableError as reason:
            answer = f"not applicable: {reason}"
        except Exception as error:  # noqa: BLE001  # any failure is reported, and the next question runs
            first = str(error).partition("\n")[0]
            if EMULATED and "no kernel image" in first:
                answers[text] = "not applicable: the emulated GPU cannot run this kernel"
                continue
            answer = f"raised {type(error).__name__}: {first}\n{traceback.format_exc()[-2000:]}"
            broken += 1
        answers[text] = answer
        print(f"{text}\n    {answer}", flush=True)
    _write(path, answers)
    return broken


def _write(path: Path | None, answers: dict[str, str]) -> None:
    if path is not None:
        path.write_text(json.dumps(answers, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
