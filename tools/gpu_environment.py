"""Record what may explain a failure on a GPU: ``python tools/gpu_environment.py OUT.json``.

The driver, its CUDA version, and the mode, memory and slices of each GPU come from NVML, peer access from the
CUDA driver. The file is written after each part, in case a query hangs.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Environment variables that change how frameworks use GPUs begin with these words.
VARIABLES = ("CUDA", "NVIDIA", "XLA", "JAX", "TF_", "PYTORCH", "CUPY", "LD_LIBRARY_PATH", "ARRAYBRIDGE")


def system() -> dict[str, Any]:
    """Return the Python, the operating system, and relevant environment variables."""
    variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)}
    return {
        "python": sys.version,
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "variables": variables,
    }


def driver() -> dict[str, Any]:
    """Return the driver, and each GPU that NVML lists."""
    import pynvml

    pynvml.nvmlInit()
    gpus = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)

        def query(function: str, *arguments: Any, handle: Any = handle) -> Any:
            try:
                return getattr(pynvml, function)(handle, *arguments)
            except pynvml.NVMLError as error:
                return str(error)

        memory = query("nvmlDeviceGetMemoryInfo")
        gpus.append(
            {
                "name": query("nvmlDeviceGetName"),
                "uuid": query("nvmlDeviceGetUUID"),
                "compute capability": query("nvmlDeviceGetCudaComputeCapability"),
                "compute mode": query("nvmlDeviceGetComputeMode"),  # 0: shared by processes, 3: exclusive
                "MIG (current, pending)": query("nvmlDeviceGetMigMode"),
                "memory (total, free)": [getattr(memory, "total", memory), getattr(memory, "free", None)],
            }
        )
    cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
    return {"driver": pynvml.nvmlSystemGetDriverVersion(), "cuda": cuda, "gpus": gpus}


def peers() -> dict[str, Any]:
    """Return which GPUs can access each other's memory. This initializes the CUDA driver, but no context."""
    cuda = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    count, can = ctypes.c_int(), ctypes.c_int()
    failed = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
    pairs = {}
    for i in range(count.value):
        for j in range(count.value):
            if i != j and not cuda.cuDeviceCanAccessPeer(ctypes.byref(can), i, j):
                pairs[f"{i} reads {j}"] = bool(can.value)
    return {"cuInit": failed, "CUDA devices": count.value, "peer access": pairs}


def packages() -> dict[str, Any]:
    """Return the output of ``pip freeze``, or the names and versions of all distributions without pip."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "freeze"], capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        return {"packages": done.stdout.splitlines()}
    from importlib.metadata import distributions

    return {"packages": sorted(f"{one.metadata['Name']}=={one.version}" for one in distributions())}


PARTS: tuple[Callable[[], dict[str, Any]], ...] = (system, packages, driver, peers)


def main() -> None:
    """Write the record, and print it without the packages."""
    record: dict[str, Any] = {}
    for part in PARTS:
        try:
            record.update(part())
        except Exception as error:  # noqa: BLE001  # any failure is part of the record
            record[part.__name__] = f"{type(error).__name__}: {error}"
        Path(sys.argv[1]).write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({name: value for name, value in record.items() if name != "packages"}, indent=1))


if __name__ == "__main__":
    main()
