"""Record how other ways of moving arrays between frameworks treat difficult arrays.

    python -m benchmarks.alternatives                    # prints, and writes results/alternatives.json
    python -m benchmarks.alternatives --folder FOLDER    # where the other libraries are installed

Each question runs in a separate process per library, since some answers crash the process. The table on
docs/coming-from.md has these answers; tests/test_docs_build.py compares the two.
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
#: Packages to install for each library, each library into a separate folder.
LIBRARIES = {
    "arraybridge": (),
    "DLPack by hand": (),
    "arraybridge 0.5.2": ("arraybridge==0.5.2",),
    "scikit-learn": ("scikit-learn==1.9.1",),
    "torch2jax": ("torch2jax==0.1.0",),
}


def converter(library: str, source: str, target: str) -> Callable[[Any], Any]:
    """Return the library's call for a pair of frameworks, or raise `LookupError` if it has none."""
    if library == "arraybridge":
        import arraybridge

        return lambda x: arraybridge.convert_memory(x, target)
    if library == "arraybridge 0.5.2":
        import arraybridge as peer

        host: Any = peer.HOST  # type: ignore[attr-defined]
        return lambda x: peer.convert_memory(x, source, target, host)  # type: ignore[call-overload]
    if library == "torch2jax":
        from torch2jax import j2t, t2j  # type: ignore[import-not-found]

        return {("torch", "jax"): t2j, ("jax", "torch"): j2t}[source, target]
    if library == "scikit-learn":
        if "tensorflow" in (source, target):
            raise LookupError("scikit-learn does not support TensorFlow")
        return _move_to(target)
    if target == "torch":
        import torch

        return torch.from_dlpack
    if target == "jax":
        import jax.numpy as jnp

        return jnp.from_dlpack
    return np.from_dlpack


def _move_to(target: str) -> Callable[[Any], Any]:
    """Return scikit-learn's internal ``move_to`` for a namespace that it supports."""
    from sklearn.utils._array_api import move_to  # type: ignore[import-not-found]

    if target == "torch":
        import array_api_compat.torch as xp
        import torch

        return lambda x: move_to(x, xp=xp, device=torch.device("cpu"))
    if target == "numpy":
        import array_api_compat.numpy as xp  # type: ignore[no-redef]

        return lambda x: move_to(x, xp=xp, device="cpu")
    raise LookupError(target)


def narrowed(library: str) -> str:
    """Return whether a float64 tensor of PyTorch keeps its values in JAX without x64, as text."""
    import torch

    result = converter(library, "torch", "jax")(torch.tensor([1e300, 2.0], dtype=torch.float64))
    return "exact" if str(result.dtype) == "float64" and float(result[0]) == 1e300 else "becomes float32"


def reversed_view(library: str) -> str:
    """Return whether a reversed NumPy view is copied correctly to PyTorch, as text."""
    result = converter(library, "numpy", "torch")(np.arange(3.0)[::-1])
    return "copied" if result.tolist() == [2.0, 1.0, 0.0] else "wrong"


def masked(library: str) -> str:
    """Return the effect of converting a masked array to PyTorch without an error, as text."""
    converter(library, "numpy", "torch")(np.ma.masked_array([1.0, 2.0], [False, True]))
    return "mask dropped"


def read_only(library: str) -> str:
    """Return whether a write to a tensor that was made from a read-only array changes the array, as text."""
    array = np.zeros(3)
    array.flags.writeable = False
    converter(library, "numpy", "torch")(array)[0] = 1
    return "copied" if array[0] == 0 else "writes to the array"


def tensorflow_to_numpy(library: str) -> str:
    """Return whether a TensorFlow tensor and the NumPy array made from it share memory, as text."""
    import tensorflow as tf

    tensor = tf.constant(np.arange(1000.0))
    result = converter(library, "tensorflow", "numpy")(tensor)
    same = result.__array_interface__["data"][0] == np.asarray(memoryview(tensor)).ctypes.data
    return "shared" if same else "copied"


QUESTIONS = (narrowed, reversed_view, masked, read_only, tensorflow_to_numpy)


def ask(library: str, question: str, folder: Path) -> str:
    """Run a question in a separate process, and return its answer, also if a signal ended the process."""
    packages = LIBRARIES[library]
    path = folder / packages[0] if packages else None
    if path is not None and not path.is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(path), *packages]
        subprocess.run(command, check=True)
    command = [sys.executable, "-m", "benchmarks.alternatives", "--ask", library, question]
    # The older release has the same import name, so it comes first; others come last and use this NumPy.
    place = "first" if library.startswith("arraybridge ") else "last"
    command += ["--path", str(path), place] if path else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode < 0:
        return "crashes the process"
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout.strip()


def answer(library: str, question: str) -> str:
    """Run a question in this process, and return its answer."""
    put = {one.__name__: one for one in QUESTIONS}[question]
    try:
        return put(library)
    except LookupError:
        return "–"
    except (TypeError, ValueError, BufferError):
        return "raises an error"


def main() -> None:
    """Ask every library every question; print and save the answers."""
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
