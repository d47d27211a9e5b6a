"""
Count cells in a folder, with Dask
==================================

A function that counts the nuclei of one image is mapped over a folder of images. Dask
reads and schedules; the function is the one that was written for a single image.
"""

# %%
# A folder of images: crops of one tissue section, turned and mirrored, each in a file
# of its own.
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
# It is written in torch: blur the blue stain, and count the pixels that are brighter
# than all their neighbours.


@ab.torch
def count_nuclei(images):
    """(n, 256, 256, 3) uint8 to (n,) int64."""
    import torch
    from torch.nn.functional import avg_pool2d, max_pool2d

    stain = 255 - images[..., 0].float()[:, None]  # what absorbs red light
    for _ in range(12):
        stain = avg_pool2d(stain, 5, stride=1, padding=2)
    peak = (stain == max_pool2d(stain, 15, stride=1, padding=7)) & (stain > 90)
    return torch.sum(peak, dim=(1, 2, 3))


print(count_nuclei(np.load(paths[0])[None]))

# %%
# Mapped over the folder
# ----------------------
# Nothing is read yet: each task reads its own file.


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
# What it scales like
# -------------------
# The same graph with one thread and with more. torch would use all cores within each
# call; one thread a call is right where there are as many calls as cores.

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
    label="what the cores allow",
)
right.set(
    xticks=workers, xlabel="threads of Dask", ylabel="times as fast as one", ylim=0
)
right.set_title(f"Speed-up on {dask.system.CPU_COUNT} cores", size=11)
right.legend()
temporary.cleanup()
plt.show()

# %%
# From here to processes and to a cluster it is two lines, which :doc:`/dask` shows.
