"""Runs a command on two emulated cards: ``python tests/emulated_gpu/run.py FOLDER [options] -- command ...``.

FOLDER is where build.py has put the card.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

#: The three ways in which a card is emulated. Lazy: nothing queued is carried out before something forces it,
#: so that a wait that was left out shows. At once: everything is, as on a card that is never behind. Guarded:
#: lazy, and the host may not touch the card's memory.
WAYS = {
    "lazy": {"GPU_STREAMS": "lazy"},
    "at-once": {"GPU_STREAMS": "at-once"},
    "guarded": {"GPU_STREAMS": "lazy", "GPU_GUARDED": "1"},
}


def environment(folder: Path, way: str, memory: int = 384 << 20) -> dict[str, str]:
    """The variables under which a program finds the emulated cards and no others."""
    folder = folder.resolve()
    (folder / "kernels").mkdir(exist_ok=True)
    path = os.pathsep.join(filter(None, (str(HERE / "tools"), os.environ.get("PATH", ""))))
    libraries = os.pathsep.join(filter(None, (str(folder), os.environ.get("LD_LIBRARY_PATH", ""))))
    return {
        **os.environ,
        **WAYS[way],
        "ARRAYBRIDGE_EMULATED_GPU": way,
        "GPU_MEMORY": str(memory),
        "GPU_PYTHON": sys.executable,
        "GPU_COMPILER": str(HERE / "compile_kernel.py"),
        "GPU_KERNELS": str(folder / "kernels"),
        "CUPY_CACHE_DIR": str(folder / "cupy"),
        "CUPY_ACCELERATORS": "",  # no kernels of CUB, which are machine code
        "LD_PRELOAD": str(folder / "libcudart.so.13"),
        "LD_LIBRARY_PATH": libraries,
        "PATH": path,
    }


def main() -> None:
    """Replace this process with the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--way", choices=list(WAYS), default="lazy")
    parser.add_argument("--memory", type=int, default=384 << 20, metavar="BYTES", help="of each card")
    parser.add_argument("command", nargs="+")
    chosen = parser.parse_args()
    found = environment(chosen.folder, chosen.way, chosen.memory)
    os.execvpe(chosen.command[0], chosen.command, found)  # noqa: S606 - a command is what it is for


if __name__ == "__main__":
    main()
