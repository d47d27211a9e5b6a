"""Compare writing to an existing array (`out=`) with a new copy and with the best native call.

    python -m benchmarks.into_an_array             # writes benchmarks/results/into_an_array.json
    python -m benchmarks.into_an_array --rounds 15 --out /tmp

Each pair is measured with 64 MiB, for which allocators request new pages, with 4 MiB, for which they reuse
memory, and with 16 elements, for the cost of a call. The native call writes to the same array: `np.copyto`
or `Tensor.copy_`. All contenders run in turn. The fastest call of each counts, because other work on the
machine only adds to the time. Page faults are those of one call.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # run as a script rather than as a module
    sys.path.insert(0, str(ROOT))

from benchmarks.timing import Summary, batch_ns, calls_per_batch, target_us, write_report  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
#: Name → number of float32 elements.
SIZES = {"64 MiB": 1 << 24, "4 MiB": 1 << 20, "16 elements": 16}
DISTRIBUTIONS = ("arraybridge", "numpy", "torch", "jax", "tensorflow-cpu", "tensorflow")
#: Maximum time that a call with 16 elements may take longer than one with ``copy=True``, in microseconds.
MAX_DIFFERENCE_US = 3.0

Contenders = dict[str, Callable[[], object]]


def cases(count: int) -> dict[str, Contenders]:
    """Return the contenders of each pair, for arrays of `count` elements."""
    import torch

    import arraybridge as ab

    shape = (16, count // 16)
    x = np.ones(shape, np.float32)
    transposed = np.ones(shape[::-1], np.float32).T
    tensor = torch.ones(shape)
    from_jax = ab.to_jax(x, copy=True)
    from_tensorflow = ab.to_tensorflow(x, copy=True)
    array, half = np.empty(shape, np.float32), np.empty(shape, np.float16)
    out, half_out = torch.empty(shape), torch.empty(shape, dtype=torch.float16)

    def compare(source: Any, target: Any, native: Callable[[], object], **options: Any) -> Contenders:
        name = "numpy" if isinstance(target, np.ndarray) else "torch"
        return {
            "out": lambda: ab.convert_memory(source, out=target, **options),
            "copy": lambda: ab.convert_memory(source, name, copy=True, **options),
            "native": native,
        }

    return {
        "NumPy → PyTorch": compare(x, out, lambda: out.copy_(torch.from_numpy(x))),
        "NumPy, transposed → PyTorch": compare(
            transposed, out, lambda: out.copy_(torch.from_numpy(transposed))
        ),
        "NumPy → PyTorch, cast to float16": compare(
            x, half_out, lambda: half_out.copy_(torch.from_numpy(x)), dtype="float16"
        ),
        "PyTorch → NumPy": compare(tensor, array, lambda: np.copyto(array, tensor.numpy())),
        "JAX → PyTorch": compare(from_jax, out, lambda: out.copy_(torch.from_dlpack(from_jax))),
        "JAX → NumPy": compare(from_jax, array, lambda: np.copyto(array, np.asarray(from_jax))),
        "TensorFlow → NumPy, cast to float16": compare(
            from_tensorflow,
            half,
            lambda: np.copyto(half, memoryview(from_tensorflow), casting="unsafe"),  # type: ignore[arg-type]
            dtype="float16",
        ),
    }


def measure(contenders: Contenders, rounds: int) -> dict[str, Any]:
    """Time the contenders in turn, count their page faults, and compare them."""
    counts = {name: calls_per_batch(call) for name, call in contenders.items()}
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, call in contenders.items():
            samples[name].append(batch_ns(call, counts[name]))
    summaries = {name: Summary.of(own) for name, own in samples.items()}
    ours = summaries["out"].minimum
    return {
        **{name: summary.as_dict() for name, summary in summaries.items()},
        "page_faults": {name: faults_of(call) for name, call in contenders.items()},
        "over_copy": round(ours / summaries["copy"].minimum, 2),
        "over_native": round(ours / summaries["native"].minimum, 2),
        "over_copy_us": round((ours - summaries["copy"].minimum) / 1e3, 2),
    }


def faults_of(call: Callable[[], object]) -> int:
    """Return the number of page faults of one call, the minimum of five."""
    counts = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        call()
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(counts)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure writing to an existing array.")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    results: dict[str, dict[str, Any]] = {}
    for size, count in SIZES.items():
        results[size] = {}
        for name, contenders in cases(count).items():
            row = results[size][name] = measure(contenders, arguments.rounds)
            times = ", ".join(f"{key} {row[key]['min_ns'] / 1e3:9.1f} µs" for key in contenders)
            print(f"{size:12} {name:36} {times}; faults {row['page_faults']}")
    differences = [row["over_copy_us"] for row in results["16 elements"].values()]
    claim = "out= over copy=True, 16 elements, the slowest pair"
    target = target_us(claim, MAX_DIFFERENCE_US, max(differences))
    path = arguments.out / "into_an_array.json"
    write_report(path, DISTRIBUTIONS, arguments.rounds, results, [target])
    print(target)


if __name__ == "__main__":
    main()
