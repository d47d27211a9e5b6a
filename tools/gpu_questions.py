"""Check assumptions about GPUs that neither documentation nor emulation can confirm.

``python tools/gpu_questions.py [OUT.json]`` runs every question that the installed frameworks allow, and
prints its answer. The answer is ``yes`` if the assumption holds, ``no`` if not, or an observed value.
Questions that cannot run are reported as ``not applicable``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import numpy as np

import arraybridge

FRAMEWORKS = ("cupy", "torch", "jax")
N = 1 << 20


class NotApplicableError(Exception):
    """The error of a question whose frameworks or GPUs are missing."""


def module(name: str) -> Any:
    """Import a framework.

    Raises:
        NotApplicableError: If it is not installed.
    """
    if importlib.util.find_spec(name) is None:
        raise NotApplicableError(f"{name} is not installed")
    return importlib.import_module(name)


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
    if len(arraybridge.devices("cupy" if importlib.util.find_spec("cupy") else "torch")) < 2:
        raise NotApplicableError("there is only one GPU")
    wrong = []
    for name in FRAMEWORKS:
        if importlib.util.find_spec(name) is not None:
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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    opened, current = done.stdout.split()
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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return yes_or_no(done.stdout.strip() == "False")


PAIRS = [(a, b) for a in FRAMEWORKS for b in FRAMEWORKS if a != b]
QUESTIONS: list[Callable[[], str]] = [
    jax_waits_for_a_side_stream_of_torch,
    *(lifetime(*pair) for pair in PAIRS),
    numpy_of_a_jax_array,
    a_jax_array_on_a_gpu_refuses_the_buffer_protocol,
    *(unusual(*pair) for pair in PAIRS),
    float8_arrives,
    from_gpu_to_gpu,
    work_on_one_gpu_opens_no_other,
    host_calls_open_no_gpu,
]


def main() -> int:
    """Run all questions, and return the number of questions that raised."""
    answers = {}
    broken = 0
    for question in QUESTIONS:
        try:
            answer = question()
        except NotApplicableError as reason:
            answer = f"not applicable: {reason}"
        except Exception as error:  # noqa: BLE001  # any failure is reported, and the next question runs
            answer = f"raised {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            broken += 1
        text = (question.__doc__ or "").strip()
        answers[text] = answer
        print(f"{text}\n    {answer}", flush=True)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(answers, indent=1) + "\n")
    return broken


if __name__ == "__main__":
    sys.exit(main())
