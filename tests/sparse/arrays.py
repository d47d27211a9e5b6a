"""Sparse arrays of each framework, created and read only by the frameworks' own calls."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.helpers import require

scipy_sparse = pytest.importorskip("scipy.sparse", reason="SciPy is not installed")

#: SciPy < 1.15 has no COO arrays with more than two axes, and no CSR arrays with one.
HAS_MORE_AXES = tuple(map(int, sys.modules["scipy"].__version__.split(".")[:2])) >= (1, 15)

#: Framework → its layouts.
LAYOUTS = {
    "numpy": ("csr", "csc", "coo", "bsr"),
    "torch": ("csr", "csc", "coo", "bsr"),
    "jax": ("csr", "coo"),
    "tensorflow": ("coo",),
}
#: Every source and target with each layout that both have.
PAIRS = [
    (source, target, layout)
    for source, layouts in LAYOUTS.items()
    for target in LAYOUTS
    for layout in layouts
    if layout in LAYOUTS[target]
]
#: Every source and target of COO, which each framework has.
COO_PAIRS = [(source, target) for source, target, layout in PAIRS if layout == "coo"]
#: PyTorch's warning about its compressed layouts, emitted once per process.
BETA = "ignore:Sparse (CSR|CSC|BSR|BSC) tensor support is in beta"


@dataclass
class Contents:
    """The parts of a sparse array as NumPy arrays; COO has a matrix of entries × axes."""

    layout: str
    shape: tuple[int, ...]
    values: np.ndarray
    indices: tuple[np.ndarray, ...]

    def bits(self) -> tuple[Any, ...]:
        """Return all data that must be preserved, apart from index dtypes."""
        indices = [index.astype(np.int64).tolist() for index in self.indices]
        values = np.ascontiguousarray(self.values)
        return self.layout, self.shape, values.dtype.name, values.shape, values.tobytes(), indices


def made(framework: str, contents: Contents) -> Any:
    """Return a sparse array of a framework with these parts, which it may share."""
    if framework != "numpy":
        require(framework)
    return _MAKE[framework](contents)


def _in_scipy(c: Contents) -> Any:
    cls = getattr(scipy_sparse, f"{c.layout}_array")
    if c.layout == "coo":
        made = cls(c.shape)
        made.data, made.coords, made.has_canonical_format = c.values, tuple(c.indices[0].T), False
        return made
    # The constructor copies views of larger arrays, and rejects some dtypes.
    made = cls(c.shape, **({"blocksize": (2, 2)} if c.layout == "bsr" else {}))
    made.data = c.values
    made.indices, made.indptr = c.indices
    return made


def as_tensor(x: np.ndarray) -> Any:
    import torch

    if x.dtype.name in ("bfloat16", "float8_e4m3fn"):
        bits = x.view(f"int{8 * x.itemsize}")
        return torch.from_numpy(np.ascontiguousarray(bits)).view(getattr(torch, x.dtype.name))
    return torch.from_numpy(np.ascontiguousarray(x))


def as_numpy(x: Any) -> np.ndarray:
    """Return a PyTorch tensor as a NumPy array that shares its memory."""
    import torch

    name = str(x.dtype).removeprefix("torch.")
    if name in ("bfloat16", "float8_e4m3fn"):
        import ml_dtypes

        bits = torch.int16 if x.element_size() == 2 else torch.int8
        return x.view(bits).numpy().view(getattr(ml_dtypes, name))
    return x.numpy()


def _in_torch(c: Contents) -> Any:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if c.layout == "coo":
            indices = as_tensor(c.indices[0].T.astype(np.int64))
            return torch.sparse_coo_tensor(indices, as_tensor(c.values), c.shape, check_invariants=False)
        indices, pointers = map(as_tensor, c.indices)
        layout = getattr(torch, f"sparse_{c.layout}")
        return torch.sparse_compressed_tensor(
            pointers, indices, as_tensor(c.values), c.shape, layout=layout, check_invariants=False
        )


def _in_jax(c: Contents) -> Any:
    import jax
    from jax.experimental import sparse

    enable = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
    with enable(True):
        arrays = [jax.numpy.array(x) for x in (c.values, *c.indices)]
        cls = sparse.BCOO if c.layout == "coo" else sparse.BCSR
        return cls(tuple(arrays), shape=c.shape)


def _in_tensorflow(c: Contents) -> Any:
    import tensorflow as tf

    return tf.SparseTensor(tf.constant(c.indices[0], tf.int64), tf.constant(c.values), c.shape)


_MAKE = {"numpy": _in_scipy, "torch": _in_torch, "jax": _in_jax, "tensorflow": _in_tensorflow}


def framework_of(x: Any) -> str:
    root = type(x).__module__.partition(".")[0]
    return {"scipy": "numpy"}.get(root, root)


def read(x: Any) -> Contents:
    """Return the parts of a sparse array, read through its framework."""
    root = framework_of(x)
    shape = tuple(int(n) for n in x.shape)
    if root == "numpy":
        if x.format == "coo":
            return Contents("coo", shape, x.data, (np.stack(x.coords, axis=1),))
        return Contents(x.format, shape, x.data, (x.indices, x.indptr))
    if root == "torch":
        layout = str(x.layout).removeprefix("torch.sparse_")
        if layout == "coo":
            return Contents(layout, shape, as_numpy(x._values()), (x._indices().numpy().T,))
        by_rows = layout in ("csr", "bsr")
        indices = (x.col_indices(), x.crow_indices()) if by_rows else (x.row_indices(), x.ccol_indices())
        return Contents(layout, shape, as_numpy(x.values()), tuple(index.numpy() for index in indices))
    if root == "jax":
        layout = {"BCOO": "coo", "BCSR": "csr"}[type(x).__name__]
        indices = (x.indices,) if layout == "coo" else (x.indices, x.indptr)
        return Contents(layout, shape, np.asarray(x.data), tuple(map(np.asarray, indices)))
    assert root == "tensorflow"
    assert isinstance(x, sys.modules["tensorflow"].SparseTensor)
    return Contents("coo", shape, tensorflow_view(x.values), (tensorflow_view(x.indices),))


def tensorflow_view(x: Any) -> np.ndarray:
    """Return a view of the tensor's memory, since ``numpy()`` copies it."""
    try:
        return np.asarray(memoryview(x))
    except (TypeError, ValueError):  # a dtype without a buffer format
        return np.asarray(x)


def dense_of(x: Any) -> Any:
    """Return the elements as nested lists, with duplicates summed, computed only from the parts."""
    c = read(x)
    dense = np.zeros(c.shape, c.values.dtype)
    if c.layout == "coo":
        np.add.at(dense, tuple(c.indices[0].T.astype(np.int64)), c.values)
        return dense.tolist()
    indices, pointers = c.indices
    compressed = np.repeat(np.arange(len(pointers) - 1), np.diff(pointers))
    if c.layout == "bsr":
        height, width = c.values.shape[1:]
        for row, column, block in zip(compressed, indices, c.values, strict=True):
            dense[row * height : (row + 1) * height, column * width : (column + 1) * width] += block
        return dense.tolist()
    places = (compressed, indices) if c.layout == "csr" else (indices, compressed)
    np.add.at(dense, places, c.values)
    return dense.tolist()


def random_contents(
    layout: str,
    *,
    shape: tuple[int, int] = (6, 8),
    count: int = 9,
    dtype: str = "float64",
    index_dtype: str = "int64",
    seed: int = 0,
) -> Contents:
    """Return random unordered entries, with duplicates, explicit zeros and empty rows."""
    random = np.random.default_rng(seed)
    if layout == "bsr":
        blocks = random_contents(
            "csr",
            shape=(shape[0] // 2, shape[1] // 2),
            count=count // 2,
            dtype=dtype,
            index_dtype=index_dtype,
            seed=seed,
        )
        values = random_values(random, (len(blocks.values), 2, 2), dtype)
        return Contents("bsr", shape, values, blocks.indices)
    rows = random.integers(0, max(1, shape[0] // 2), count) * 2 % max(1, shape[0])
    columns = random.integers(0, max(1, shape[1]), count)
    if 0 in shape:
        rows, columns = rows[:0], columns[:0]
    if len(rows) > 2:
        rows[1], columns[1] = rows[0], columns[0]
    values = random_values(random, (len(rows),), dtype)
    if layout == "coo":
        return Contents("coo", shape, values, (np.stack([rows, columns], axis=1).astype(index_dtype),))
    compressed, others, length = (rows, columns, shape[0]) if layout == "csr" else (columns, rows, shape[1])
    order = np.argsort(compressed, kind="stable")
    pointers = np.concatenate([[0], np.cumsum(np.bincount(compressed, minlength=length))])
    indices = others[order].astype(index_dtype), pointers.astype(index_dtype)
    return Contents(layout, shape, values[order], indices)


def random_values(random: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Return values of a dtype, with an explicit zero among them."""
    if dtype in ("bfloat16", "float8_e4m3fn"):
        values = random.integers(-8, 8, shape).astype(getattr(require("ml_dtypes"), dtype))
    elif dtype == "bool":
        values = random.integers(0, 2, shape).astype(bool)
    elif dtype.startswith("complex"):
        values = (random.normal(size=shape) + 1j * random.normal(size=shape)).astype(dtype)
    elif dtype.startswith(("float", "longdouble")):
        values = random.normal(size=shape).astype(dtype)
    else:
        bounds = np.iinfo(dtype)
        values = random.integers(bounds.min, bounds.max, shape, dtype=dtype, endpoint=True)
    if values.size:
        values.reshape(-1)[0] = 0
    return values
