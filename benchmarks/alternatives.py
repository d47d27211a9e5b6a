"""What other ways from one framework to another do with arrays that need care.

    python -m benchmarks.alternatives                    # prints, and writes results/alternatives.json
    python -m benchmarks.alternatives --folder FOLDER    # the other libraries are, or will be put, there

Each question is put to each library in a process of its own, since some answers end the process. The table
of the README has these answers; tests/test_readme.py holds them against each other.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results" / "alternatives.json"
#: What is installed for each library, each into a folder of its own.
LIBRARIES = {
    "arraybridge": (),
    "arraybridge 0.5.2": ("arraybridge==0.5.2",),
    "thinc": ("thinc==9.1.1",),
    "DLPack by hand": (),
}


def converter(library: str, source: str, target: str) -> Callable[[Any], Any]:
    """The call by which a library goes from one framework to another; LookupError where it has none."""
    if library == "arraybridge":
        import arraybridge

        return lambda x: arraybridge.convert_memory(x, target)
    if library == "arraybridge 0.5.2":
        import arraybridge as peer

        host: Any = peer.HOST  # type: ignore[attr-defined]
        return lambda x: peer.convert_memory(x, source, target, host)  # type: ignore[call-overload]
    if library == "thinc":
        from thinc import api  # type: ignore[import-not-found]

        return {("numpy", "torch"): api.xp2torch, ("torch", "numpy"): api.torch2xp}[source, target]
    if target == "torch":
        import torch

        return torch.from_dlpack
    if target == "jax":
        import jax.numpy as jnp

        return jnp.from_dlpack
    return np.from_dlpack


def narrowed(library: str) -> str:
    """float64 from torch to JAX, x64 off."""
    import torch

    result = converter(library, "torch", "jax")(torch.tensor([1e300, 2.0], dtype=torch.float64))
    return "exact" if str(result.dtype) == "float64" and float(result[0]) == 1e300 else "becomes float32"


def backwards(library: str) -> str:
    """A reversed NumPy view to torch."""
    result = converter(library, "numpy", "torch")(np.arange(3.0)[::-1])
    return "copied" if result.tolist() == [2.0, 1.0, 0.0] else "wrong"


def masked(library: str) -> str:
    """A masked array to torch."""
    converter(library, "numpy", "torch")(np.ma.masked_array([1.0, 2.0], [False, True]))
    return "mask dropped"


def read_only(library: str) -> str:
    """A read-only NumPy array to torch, and then a write to the tensor."""
    array = np.zeros(3)
    array.flags.writeable = False
    converter(library, "numpy", "torch")(array)[0] = 1
    return "copied" if array[0] == 0 else "written through"


def tensorflow_to_numpy(library: str) -> str:
    """Whether a TensorFlow tensor and the NumPy array made of it are the same bytes."""
    import tensorflow as tf

    tensor = tf.constant(np.arange(1000.0))
    result = converter(library, "tensorflow", "numpy")(tensor)
    same = result.__array_interface__["data"][0] == np.asarray(memoryview(tensor)).ctypes.data
    return "shared" if same else "copied"


QUESTIONS = (narrowed, backwards, masked, read_only, tensorflow_to_numpy)


def ask(library: str, question: str, folder: Path) -> str:
    """The answer of a process of its own: what the question returns, "refused", or how it ended."""
    packages = LIBRARIES[library]
    path = folder / packages[0] if packages else None
    if path is not None and not path.is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(path), *packages]
        subprocess.run(command, check=True)
    command = [sys.executable, "-m", "benchmarks.alternatives", "--ask", library, question]
    # The peer has the same import name, and comes first; the others come last, and take NumPy from here.
    place = "first" if library.startswith("arraybridge ") else "last"
    command += ["--path", str(path), place] if path else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode < 0:
        return "ends the process"
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout.strip()


def answer(library: str, question: str) -> str:
    """Put a question in this process."""
    put = {one.__name__: one for one in QUESTIONS}[question]
    try:
        return put(library)
    except LookupError:
        return "–"
    except (TypeError, ValueError, BufferError):
        return "refused"


def main() -> None:
    """Put every question to every library, print and keep the answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "arraybridge-alternatives"
    )
    parser.add_argument("--ask", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--path", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.ask:
        if chosen.path:
            path, place = chosen.path
            sys.path.insert(0 if place == "first" else len(sys.path), path)
        print(answer(*chosen.ask))
        return
    answers = {
        question.__name__: {library: ask(library, question.__name__, chosen.folder) for library in LIBRARIES}
        for question in QUESTIONS
    }
    versions = {name: importlib.metadata.version(name) for name in ("numpy", "torch", "jax")}
    RESULTS.write_text(
        json.dumps({"versions": versions, "answers": answers}, indent=1) + "\n", encoding="utf-8"
    )
    for question, row in answers.items():
        print(f"{question:20}", *(f"{library}: {word}" for library, word in row.items()), sep=" | ")


if __name__ == "__main__":
    main()
