"""Compare loading a checkpoint with the readers of the package safetensors.

    python -m benchmarks.safetensors_files             # writes benchmarks/results/safetensors_files.json
    python -m benchmarks.safetensors_files --gib 0.25 --rounds 3 --out /tmp

A checkpoint of 1 GiB (matrices of 16 MiB, biases and a counter) is written by `save_safetensors` and by
`safetensors.torch.save_file`. Each load runs in a separate process, which has loaded a small checkpoint
before. All contenders take turns, one process each per round. The smallest figure of each contender counts.
CPU time depends less on other work on the machine than elapsed time.

- ``load``: CPU seconds until all tensors are arrays of the framework.
- ``peak``: the largest resident memory during the load over that before it, in MiB.
- ``private``: the memory that only this process uses after the load, in MiB. Unchanged pages of a mapped
  file do not count, because processes share them.
- ``first_use``: CPU seconds to read one byte of each page of the arrays.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # run as a script rather than as a module
    sys.path.insert(0, str(ROOT))

from benchmarks.timing import machine, versions  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
TARGETS = ("numpy", "torch", "jax", "tensorflow")
#: The reader and the writer of the file.
CONTENDERS = (("package", "package"), ("arraybridge", "arraybridge"), ("arraybridge", "package"))
MATRIX = (2048, 2048)
MIB = 2**20
#: The largest CPU time in seconds, and private memory in MiB, of loading a file of `save_safetensors`.
MAX_SECONDS = 0.05
MAX_MIB = 8.0
DISTRIBUTIONS = ("arraybridge", "safetensors", "numpy", "torch", "jax", "tensorflow-cpu", "tensorflow")


def write(folder: Path, matrices: int) -> None:
    """Write the checkpoint and a small one, each by arraybridge and by the package."""
    import torch
    from safetensors.torch import save_file

    from arraybridge import save_safetensors

    random = np.random.default_rng(0)
    for name, count in (("small", 1), ("large", matrices)):
        arrays: dict[str, Any] = {"steps": torch.tensor(1000)}
        for number in range(count):
            arrays[f"layers.{number}.weight"] = torch.from_numpy(random.random(MATRIX, np.float32))
            arrays[f"layers.{number}.bias"] = torch.zeros(MATRIX[0])
        save_safetensors(folder / f"{name}.arraybridge", arrays)
        save_file(arrays, folder / f"{name}.package")


def loader(reader: str, target: str) -> Callable[[Path], dict[str, Any]]:
    """Return the function that loads a file into arrays of the target."""
    if reader == "package":
        import importlib

        module = importlib.import_module(f"safetensors.{'flax' if target == 'jax' else target}")
        load: Callable[[Path], dict[str, Any]] = module.load_file
        return load
    import arraybridge as ab

    return lambda path: ab.convert_tree(ab.load_safetensors(path), target)


def kib(file: str, field: str) -> int:
    """Return a counter of this process in KiB."""
    match = re.search(rf"^{field}:\s+(\d+) kB", Path(f"/proc/self/{file}").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1])


def measure(reader: str, writer: str, target: str, folder: Path) -> dict[str, float]:
    """Load the checkpoint in this process, and return the measurements."""
    import arraybridge as ab

    load = loader(reader, target)
    kept = load(folder / f"small.{writer}")
    read_pages(ab.convert_tree(kept, "numpy"))
    path = folder / f"large.{writer}"
    Path("/proc/self/clear_refs").write_text("5")  # reset the largest resident memory to the current one
    resident = kib("status", "VmRSS")
    private = kib("smaps_rollup", "Anonymous")
    start = time.process_time()
    arrays = load(path)
    if target == "jax":
        import jax

        jax.block_until_ready(arrays)
    seconds = time.process_time() - start
    peak = kib("status", "VmHWM") - resident
    private = kib("smaps_rollup", "Anonymous") - private
    views = ab.convert_tree(arrays, "numpy")
    start = time.process_time()
    read_pages(views)
    first_use = time.process_time() - start
    return {"load": seconds, "peak": peak / 1024, "private": private / 1024, "first_use": first_use}


def read_pages(views: dict[str, Any]) -> int:
    """Read one byte of each page."""
    return sum(int(view.reshape(-1).view(np.uint8)[::4096].sum()) for view in views.values())


def run(arguments: list[str]) -> dict[str, float]:
    """Return the measurements of a new process."""
    command = [sys.executable, "-m", "benchmarks.safetensors_files", "--one", *arguments]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure loading a checkpoint into each framework.")
    parser.add_argument("--gib", type=float, default=1.0, help="size of the checkpoint")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        *names, place = arguments.one
        print(json.dumps(measure(*names, Path(place))))
        return
    samples: dict[tuple[str, str, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as place:
        write(Path(place), max(1, round(arguments.gib * 1024 / 16)))
        size = (Path(place) / "large.arraybridge").stat().st_size / MIB
        for _ in range(arguments.rounds):
            for target in TARGETS:
                for reader, writer in CONTENDERS:
                    result = run([reader, writer, target, place])
                    samples.setdefault((target, reader, writer), []).append(result)
    rows = []
    for (target, reader, writer), results in samples.items():
        row: dict[str, Any] = {"target": target, "reader": reader, "writer": writer}
        for name, digits in (("load", 5), ("peak", 1), ("private", 1), ("first_use", 5)):
            row[name] = round(min(result[name] for result in results), digits)
        rows.append(row)
        print(
            f"{target:10} read by {reader:11} written by {writer:11} {row['load'] * 1e3:8.1f} ms"
            f" peak {row['peak']:7.1f} MiB, private {row['private']:7.1f} MiB,"
            f" first use {row['first_use'] * 1e3:6.1f} ms"
        )
    ours = [row for row in rows if row["writer"] == "arraybridge"]
    targets = [
        {
            "claim": f"CPU time to load {size:.0f} MiB into the slowest framework",
            "target": f"<= {MAX_SECONDS}",
            "unit": "s",
            "measured": max(row["load"] for row in ours),
            "met": max(row["load"] for row in ours) <= MAX_SECONDS,
        },
        {
            "claim": f"Private memory after loading {size:.0f} MiB",
            "target": f"<= {MAX_MIB}",
            "unit": "MiB",
            "measured": max(row["private"] for row in ours),
            "met": max(row["private"] for row in ours) <= MAX_MIB,
        },
    ]
    report = {
        "machine": machine(),
        "versions": versions(*DISTRIBUTIONS),
        "rounds": arguments.rounds,
        "mib": round(size, 1),
        "rows": rows,
        "targets": targets,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "safetensors_files.json").write_text(json.dumps({"load": report}, indent=1) + "\n")
    for one in targets:
        print(one)


if __name__ == "__main__":
    main()
