"""
A file larger than memory
=========================

A PyTorch model runs over an array file of 256 MiB, and the program needs a small part
of that memory. The file is mapped in copy-on-write mode, so that each slice is shared
with PyTorch without a copy, and nothing that the program writes reaches the file.
"""

# %%
# The file is written in parts too. It holds 262,144 rows of 256 numbers, behind the
# header of a ``.npy`` file.
import tempfile
import textwrap
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import psutil
import torch

import arraybridge as ab

MIB = 2**20
ROWS, COLUMNS, PART = 2**18, 256, 2**14

folder = tempfile.TemporaryDirectory()
path = Path(folder.name) / "features.npy"
header = {"descr": "<f4", "fortran_order": False, "shape": (ROWS, COLUMNS)}
random = np.random.default_rng(0)
with path.open("wb") as file:
    np.lib.format.write_array_header_1_0(file, header)
    for _ in range(0, ROWS, PART):
        file.write(random.random((PART, COLUMNS), np.float32).tobytes())
print(f"the file: {path.stat().st_size / MIB:.0f} MiB")

# %%
# Read-only or copy-on-write
# --------------------------
# PyTorch has no read-only tensors. A file that is mapped for reading only is therefore
# copied, and ``explain`` gives the reason and the advice.
route = ab.explain(np.load(path, mmap_mode="r")[:PART], "torch")
print(textwrap.fill(str(route), 95))
print("Advice:", textwrap.fill(route.advice, 95))

shared = ab.explain(np.load(path, mmap_mode="c")[:PART], "torch")
print(shared)

assert route.copies == 1
assert shared.shares_memory


# %%
# The model, slice by slice
# -------------------------
# Each slice has its own map, which is released with the slice. A map of the whole file
# would keep the pages that were read, as long as the system has memory to spare.
def slices(path, rows):
    length = len(np.load(path, mmap_mode="c"))
    for start in range(0, length, rows):
        yield np.load(path, mmap_mode="c")[start : start + rows]


torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(COLUMNS, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)
)


@torch.no_grad()
def predict(part):
    x = ab.to_torch(part)  # shares the pages of the file
    x -= 0.5  # in place: the changed pages are private to this program
    return model(x)


predict(next(slices(path, PART)))  # PyTorch starts its threads

# %%
# The memory of the process is measured while each slice is in use.
process = psutil.Process()
before = process.memory_info().rss
used = []
results = np.empty((ROWS, 8), np.float32)
for i, part in enumerate(slices(path, PART)):
    results[i * PART : (i + 1) * PART] = predict(part)
    used.append((process.memory_info().rss - before) / MIB)

print(f"slices of {part.nbytes / MIB:.0f} MiB; at most {max(used):.0f} MiB more memory")

figure, axis = plt.subplots(figsize=(4.8, 3), layout="constrained")
axis.plot(used, marker=".", label="memory of the process, since the start")
axis.axhline(path.stat().st_size / MIB, color="0.5", label="size of the file")
axis.set(xlabel="slice", ylabel="MiB", ylim=(0, None))
axis.legend(loc="center right")

assert max(used) < path.stat().st_size / MIB / 3

# %%
# The file has not changed: the subtraction was made in private pages.
random = np.random.default_rng(0)
first = random.random((PART, COLUMNS), np.float32)
assert np.array_equal(np.load(path, mmap_mode="r")[:PART], first)

with torch.no_grad():
    expected = model(torch.from_numpy(first - 0.5)).numpy()
assert np.allclose(results[:PART], expected, atol=1e-6)

del part
folder.cleanup()
plt.show()

# %%
# While a file is mapped, do not overwrite or shorten it: to read a page behind the new
# end crashes the process. Write another file, and rename it.
# :doc:`/carriers` has the rules.
