"""
A sparse count matrix through a PyTorch model
=============================================

A matrix of gene counts has few entries: most genes are silent in most cells. As a dense
array, this one would take 3.7 GiB. It goes through a PyTorch model and back as a
sparse array, without a copy.
"""

# %%
# Counts of 50,000 cells and 20,000 genes in SciPy, with one entry in a thousand.
import tracemalloc
import warnings

import matplotlib.pyplot as plt
import numpy as np
import scipy.sparse

import arraybridge as ab

# PyTorch warns once that its sparse CSR tensors are new.
warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")

rng = np.random.default_rng(0)
cells, genes, entries = 50_000, 20_000, 1_000_000
depth = rng.lognormal(0, 0.8, cells)  # some cells are read more often than others
rows = rng.choice(cells, entries, p=depth / depth.sum())
columns = (genes * rng.beta(0.5, 3, entries)).astype(int)
counts = scipy.sparse.csr_matrix(
    (np.ones(entries, np.float32), (rows, columns)), shape=(cells, genes)
)

# %%
# SciPy sums duplicates in place, even in ``max()``, and would change the tensor that
# shares the memory. So sum them first, or pass ``copy=True``.
counts.sum_duplicates()
stored = counts.data.nbytes + counts.indices.nbytes + counts.indptr.nbytes
print(f"stored: {stored / 1e6:.1f} MB, dense: {4 * cells * genes / 2**30:.1f} GiB")
print(ab.explain(counts, "torch"))

# %%
# The model
# ---------
# ``output_type="input"`` restores the framework and the kind: the normalized counts are
# a SciPy matrix, the embedding is a NumPy array.


@ab.torch(output_type="input")
def normalized(x):
    """Return the log of the counts per 10,000 in each cell, with the same entries."""
    import torch

    total = torch.sparse.sum(x.to_sparse_coo(), dim=1).to_dense().clamp(min=1)
    per_entry = torch.repeat_interleave(total, x.crow_indices().diff())
    values = torch.log1p(x.values() / per_entry * 10_000)
    return torch.sparse_csr_tensor(
        x.crow_indices(), x.col_indices(), values, x.shape, check_invariants=False
    )


@ab.torch(output_type="input")
def embedding(x, weights):
    """Return two numbers per cell: a product of a sparse and a dense matrix."""
    return x @ weights


weights = rng.normal(0, 0.1, (genes, 2)).astype(np.float32)

# %%
# Memory
# ------
# ``tracemalloc`` measures the memory that NumPy allocates during both conversions.

tracemalloc.start()
tensor = ab.to_torch(counts)
back = ab.to_numpy(tensor)
_, most = tracemalloc.get_traced_memory()
tracemalloc.stop()
print(f"to PyTorch and back: {most / 1e3:.1f} kB of new memory")
assert np.shares_memory(back.data, counts.data)
assert np.shares_memory(back.indices, counts.indices)

with ab.trace() as log:
    logs = normalized(counts)
    points = embedding(logs, weights)
print(type(logs).__name__, logs.shape, points.shape)
print(log)
assert log.total_bytes_copied == 0

# %%
# The result
# ----------

depth_of_cell = np.asarray(counts.sum(axis=1)).ravel()
figure, axis = plt.subplots(figsize=(4.8, 4.2), layout="constrained")
dots = axis.scatter(*points.T, c=np.log10(depth_of_cell + 1), s=1, cmap="viridis")
figure.colorbar(dots, label="log10 of the counts of a cell")
axis.set(xlabel="first axis", ylabel="second axis", title="50,000 cells")
plt.show()

# %%
# :doc:`/sparse` lists the layouts of each framework, and what is shared.
