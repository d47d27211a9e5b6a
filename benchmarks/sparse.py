"""Compare conversions of sparse arrays with building the target by hand.

    python -m benchmarks.sparse             # writes benchmarks/results/sparse.json
    python -m benchmarks.sparse --rounds 15 --out /tmp
    python -m benchmarks.sparse --without peer

Each pair is measured with a small matrix, for the cost of a call, and with a million entries, for the cost of
copies. "By hand" is the code that users write with the public calls of both frameworks. It makes the copies
that these calls make, and omits the checks of the library, such as that of JAX's padding. Both contenders run
in turn, one batch each per round. The fastest batch of each counts, because other work on the machine only
adds to the time. The peer, arraybridge 0.5.2, converts none of these arrays; the results have its answers.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # run as a script rather than as a module
    sys.path.insert(0, str(ROOT))

from benchmarks import peer  # noqa: E402
from benchmarks.timing import Summary, batch_ns, calls_per_batch, target_us, write_report  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
#: Maximum allowed overhead of SciPy CSR to PyTorch over `torch.sparse_csr_tensor` by hand, in microseconds.
MAX_DIFFERENCE_US = 30.0
#: Name → shape and number of entries.
SIZES = {"small": ((100, 80), 200), "a million entries": ((200_000, 200_000), 1_000_000)}
DISTRIBUTIONS = ("arraybridge", "numpy", "scipy", "torch", "jax", "tensorflow-cpu", "tensorflow")

Contenders = tuple[Callable[[], object], Callable[[], object]]


def pairs(shape: tuple[int, int], count: int) -> dict[str, Contenders]:
    """Return the conversion of each pair, and the same by hand."""
    import jax
    import scipy.sparse
    import tensorflow as tf
    import torch
    from jax.experimental import sparse

    import arraybridge as ab

    random = np.random.default_rng(0)
    coordinates = random.integers(0, shape[0], count), random.integers(0, shape[1], count)
    values = random.random(count, np.float32)
    coo = scipy.sparse.coo_array((values, coordinates), shape=shape)
    rows = coo.tocsr()
    rows_torch = ab.to_torch(rows)
    coo_torch = ab.to_torch(coo)
    rows_jax = ab.to_jax(rows)
    coo_jax = ab.to_jax(coo)
    coo_tensorflow: Any = ab.to_tensorflow(coo)

    def csr_to_torch() -> Any:
        parts = map(torch.from_numpy, (rows.indptr, rows.indices, rows.data))
        return torch.sparse_csr_tensor(*parts, rows.shape)

    def csr_from_torch() -> Any:
        parts = rows_torch.values(), rows_torch.col_indices(), rows_torch.crow_indices()
        return scipy.sparse.csr_array(tuple(part.numpy() for part in parts), shape=rows_torch.shape)

    def csr_to_jax() -> Any:
        parts = map(jax.numpy.asarray, (rows.data, rows.indices, rows.indptr))
        return sparse.BCSR(tuple(parts), shape=rows.shape).block_until_ready()

    def csr_from_jax() -> Any:
        parts = map(np.asarray, (rows_jax.data, rows_jax.indices, rows_jax.indptr))
        return scipy.sparse.csr_array(tuple(parts), shape=rows_jax.shape)

    def csr_torch_to_jax() -> Any:
        parts = rows_torch.values(), rows_torch.col_indices(), rows_torch.crow_indices()
        arrays = tuple(map(jax.dlpack.from_dlpack, parts))
        return sparse.BCSR(arrays, shape=tuple(rows_torch.shape)).block_until_ready()

    def coo_to_torch() -> Any:
        indices = torch.from_numpy(np.stack(coo.coords).astype(np.int64, copy=False))
        return torch.sparse_coo_tensor(indices, torch.from_numpy(coo.data), coo.shape)

    def coo_from_torch() -> Any:
        coordinates = tuple(coo_torch._indices().numpy())
        return scipy.sparse.coo_array((coo_torch._values().numpy(), coordinates), shape=coo_torch.shape)

    def coo_to_tensorflow() -> Any:
        return tf.SparseTensor(np.stack(coo.coords, axis=1).astype(np.int64, copy=False), coo.data, coo.shape)

    def coo_from_tensorflow() -> Any:
        coordinates = tuple(coo_tensorflow.indices.numpy().T)
        return scipy.sparse.coo_array((coo_tensorflow.values.numpy(), coordinates), shape=tuple(coo.shape))

    def coo_to_jax() -> Any:
        indices = jax.numpy.asarray(np.stack(coo.coords, axis=1))
        made = sparse.BCOO((jax.numpy.asarray(coo.data), indices), shape=coo.shape)
        return made.block_until_ready()

    def coo_from_jax() -> Any:
        coordinates = tuple(np.asarray(coo_jax.indices).T)
        return scipy.sparse.coo_array((np.asarray(coo_jax.data), coordinates), shape=coo_jax.shape)

    def coo_tensorflow_to_torch() -> Any:
        indices = torch.from_numpy(coo_tensorflow.indices.numpy()).t()
        return torch.sparse_coo_tensor(indices, torch.from_numpy(coo_tensorflow.values.numpy()), coo.shape)

    return {
        "SciPy CSR → PyTorch": (lambda: ab.to_torch(rows), csr_to_torch),
        "PyTorch CSR → SciPy": (lambda: ab.to_numpy(rows_torch), csr_from_torch),
        "SciPy CSR → JAX": (lambda: ab.to_jax(rows), csr_to_jax),
        "JAX CSR → SciPy": (lambda: ab.to_numpy(rows_jax), csr_from_jax),
        "PyTorch CSR → JAX": (lambda: ab.to_jax(rows_torch), csr_torch_to_jax),
        "SciPy COO → PyTorch": (lambda: ab.to_torch(coo), coo_to_torch),
        "PyTorch COO → SciPy": (lambda: ab.to_numpy(coo_torch), coo_from_torch),
        "SciPy COO → JAX": (lambda: ab.to_jax(coo), coo_to_jax),
        "JAX COO → SciPy": (lambda: ab.to_numpy(coo_jax), coo_from_jax),
        "SciPy COO → TensorFlow": (lambda: ab.to_tensorflow(coo), coo_to_tensorflow),
        "TensorFlow COO → SciPy": (lambda: ab.to_numpy(coo_tensorflow), coo_from_tensorflow),
        "TensorFlow COO → PyTorch": (lambda: ab.to_torch(coo_tensorflow), coo_tensorflow_to_torch),
    }


def questions() -> dict[str, tuple[Any, str, str]]:
    """Return the same conversions of small arrays for the peer."""
    import scipy.sparse
    import tensorflow as tf
    import torch
    from jax.experimental import sparse

    coo = scipy.sparse.coo_array(np.eye(3, dtype=np.float32))
    rows = coo.tocsr()
    parts = map(torch.from_numpy, (rows.indptr, rows.indices, rows.data))
    rows_torch = torch.sparse_csr_tensor(*parts, rows.shape)
    coo_torch = torch.eye(3).to_sparse()
    coo_tensorflow: Any = tf.sparse.eye(3)
    rows_jax = sparse.BCSR.from_scipy_sparse(rows)
    coo_jax = sparse.BCOO.from_scipy_sparse(coo)
    return {
        "SciPy CSR → PyTorch": (rows, "numpy", "torch"),
        "PyTorch CSR → SciPy": (rows_torch, "torch", "numpy"),
        "SciPy CSR → JAX": (rows, "numpy", "jax"),
        "JAX CSR → SciPy": (rows_jax, "jax", "numpy"),
        "PyTorch CSR → JAX": (rows_torch, "torch", "jax"),
        "SciPy COO → PyTorch": (coo, "numpy", "torch"),
        "PyTorch COO → SciPy": (coo_torch, "torch", "numpy"),
        "SciPy COO → JAX": (coo, "numpy", "jax"),
        "JAX COO → SciPy": (coo_jax, "jax", "numpy"),
        "SciPy COO → TensorFlow": (coo, "numpy", "tensorflow"),
        "TensorFlow COO → SciPy": (coo_tensorflow, "tensorflow", "numpy"),
        "TensorFlow COO → PyTorch": (coo_tensorflow, "tensorflow", "torch"),
    }


def measure(ours: Callable[[], object], by_hand: Callable[[], object], rounds: int) -> dict[str, Any]:
    """Time both contenders in turn, and compare them."""
    counts = calls_per_batch(ours), calls_per_batch(by_hand)
    samples: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for contender, count, own in zip((ours, by_hand), counts, samples, strict=True):
            own.append(batch_ns(contender, count))
    first, second = map(Summary.of, samples)
    return {
        "ours": first.as_dict(),
        "by_hand": second.as_dict(),
        "ratio": round(first.minimum / second.minimum, 2),
        "over_by_hand_us": round((first.minimum - second.minimum) / 1e3, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure sparse conversions and the same by hand.")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    peer.add_options(parser)
    arguments = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    warnings.filterwarnings("ignore", "Sparse")  # from PyTorch, once per process
    answers = peer.answers_for("benchmarks.sparse", arguments)
    results: dict[str, dict[str, Any]] = {}
    for size, (shape, count) in SIZES.items():
        results[size] = {}
        for name, contenders in pairs(shape, count).items():
            row = results[size][name] = measure(*contenders, arguments.rounds)
            if name in answers:
                row["peer"] = answers[name]
            ours, by_hand = row["ours"]["min_ns"] / 1e3, row["by_hand"]["min_ns"] / 1e3
            print(f"{size:18} {name:25} {ours:9.1f} µs, by hand {by_hand:9.1f}: {row['ratio']:6.2f} times")
    measured = results["small"]["SciPy CSR → PyTorch"]["over_by_hand_us"]
    claim = "SciPy CSR to PyTorch, over torch.sparse_csr_tensor by hand"
    target = target_us(claim, MAX_DIFFERENCE_US, measured)
    write_report(arguments.out / "sparse.json", DISTRIBUTIONS, arguments.rounds, results, [target])
    print(target)


if __name__ == "__main__":
    main()
