"""
Count cells in a folder, with Dask
==================================

A function counts the nuclei in one image. ``map_blocks`` applies it to a folder of
images, and Dask reads the files and schedules the calls.
"""

# %%
# Write a folder of images: rotated crops of one tissue section, one file per crop.
import tempfile
import time
from pathlib import Path

import dask
import dask.array as da
import matplotlib.pyplot as plt
import numpy as np
import skimage

import arraybridge as ab
from arraybridge.dask import map_blocks

temporary = tempfile.TemporaryDirectory()
tissue = skimage.data.immunohistochemistry()
for number in range(32):
    corner = 32 * (number % 8)
    crop = np.rot90(
        tissue[corner : corner + 256, 256 - corner : 512 - corner], number // 8
    )
    np.save(Path(temporary.name) / f"{number:03}.npy", crop)
paths = sorted(Path(temporary.name).glob("*.npy"))
print(len(paths), "images")


# %%
# The function for one image
# --------------------------
# The function uses PyTorch. It blurs the blue stain, and counts the pixels that are
# brighter than all their neighbors.


@ab.torch
def count_nuclei(images):
    """Count the nuclei per image: (n, 256, 256, 3) uint8 to (n,) int64."""
    import torch
    from torch.nn.functional import avg_pool2d, max_pool2d

    stain = 255 - images[..., 0].float()[:, None]  # absorbs red light
    for _ in range(12):
        stain = avg_pool2d(stain, 5, stride=1, padding=2)
    peak = (stain == max_pool2d(stain, 15, stride=1, padding=7)) & (stain > 90)
    return torch.sum(peak, dim=(1, 2, 3))


print(count_nuclei(np.load(paths[0])[None]))

# %%
# Map it over the folder
# ----------------------
# Each task reads one file when the result is computed.


def read(path):
    return np.load(path)[None]


lazy = [
    da.from_delayed(dask.delayed(read)(path), (1, 256, 256, 3), np.uint8)
    for path in paths
]
images = da.concatenate(lazy)
counts = map_blocks(count_nuclei, images, dtype="int64", drop_axis=(1, 2, 3))
found = counts.compute(scheduler="threads")
print(found)
assert found[0] == count_nuclei(read(paths[0]))[0]

# %%
# Speed-up with more threads
# --------------------------
# Compute the same graph with one, two and four threads. By default, PyTorch uses all
# cores within each call. With one call per core, one PyTorch thread per call is better.

import torch

before = torch.get_num_threads()
torch.set_num_threads(1)
workers, seconds = [1, 2, 4], []
for count in workers:
    start = time.perf_counter()
    counts.compute(scheduler="threads", num_workers=count)
    seconds.append(time.perf_counter() - start)
torch.set_num_threads(before)

figure, (left, right) = plt.subplots(2, 1, figsize=(4.8, 5.6), layout="constrained")
left.imshow(np.load(paths[0]))
left.set_title(f"One of {len(paths)} images: {found[0]} nuclei", size=11)
left.axis("off")
right.plot(workers, seconds[0] / np.array(seconds), "o-", label="measured")
right.plot(
    workers,
    np.minimum(workers, dask.system.CPU_COUNT),
    ":",
    color="grey",
    label="limit of the cores",
)
right.set(
    xticks=workers, xlabel="Dask threads", ylabel="speed-up over one thread", ylim=0
)
right.set_title(f"Speed-up on {dask.system.CPU_COUNT} cores", size=11)
right.legend()
temporary.cleanup()
plt.show()

# %%
# :doc:`/dask-cluster` shows the two lines that run this in processes or on a cluster.
