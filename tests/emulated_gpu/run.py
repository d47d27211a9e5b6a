"""Run a command on emulated GPUs: ``python tests/emulated_gpu/run.py FOLDER [options] -- command ...``.

FOLDER is the output folder of build.py.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

#: The three modes of the emulated GPU. Lazy: queued work does not run until something forces it, so that a
#: missing wait shows. Eager: work runs immediately, as on a GPU that never lags behind. Guarded: lazy, and
#: the host must not access the GPU's memory.
WAYS = {
    "lazy": {"GPU_STREAMS": "lazy"},
    "at-once": {"GPU_STREAMS": "at-once"},
    "guarded": {"GPU_STREAMS": "lazy", "GPU_GUARDED": "1"},
}


def environment(folder: Path, way: str, gpus: int = 2, memory: int = 384 << 20) -> dict[str, str]:
    """Return the environment in which a program finds the emulated GPUs and no others."""
    folder = folder.resolve()
    (folder / "kernels").mkdir(exist_ok=True)
    path = os.pathsep.join(filter(None, (str(HERE / "tools"), os.environ.get("PATH", ""))))
    libraries = os.pathsep.join(filter(None, (str(folder), os.environ.get("LD_LIBRARY_PATH", ""))))
    return {
        **os.environ,
        **WAYS[way],
        "ARRAYBRIDGE_EMULATED_GPU": way,
        "GPU_COUNT": str(gpus),
        "GPU_MEMORY": str(memory),
        "GPU_PYTHON": sys.executable,
        "GPU_COMPILER": str(HERE / "compile_kernel.py"),
        "GPU_KERNELS": str(folder / "kernels"),
        "CUPY_CACHE_DIR": str(folder / "cupy"),
        "CUPY_ACCELERATORS": "",  # CUB's kernels are machine code
        "LD_PRELOAD": str(folder / "libcudart.so.13"),
        "LD_LIBRARY_PATH": libraries,
        "PATH": path,
    }


def main() -> None:
    """Replace this process with the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--way", choices=list(WAYS), default="lazy")
    parser.add_argument("--gpus", type=int, default=2, metavar="COUNT")
    parser.add_argument("--memory", type=int, default=384 << 20, metavar="BYTES", help="of each GPU")
    parser.add_argument("command", nargs="+")
    chosen = parser.parse_args()
    found = environment(chosen.folder, chosen.way, chosen.gpus, chosen.memory)
    os.execvpe(chosen.command[0], chosen.command, found)  # noqa: S606 - running a command is the purpose


if __name__ == "__main__":
    main()
