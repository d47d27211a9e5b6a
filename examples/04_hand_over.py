"""
Share GPU memory between two libraries
======================================

A detector in one framework fills the GPU. The segmentation in another framework then
runs out of memory, because the first framework keeps its memory as a cache. This
happens, for example, with a star-convex detector in TensorFlow before a network in
PyTorch. This program shows the solution without a GPU: it uses two OpenCL devices, and
simulates the lack of memory.
"""

# %%
# PoCL presents the CPU as two OpenCL devices. On a machine with GPUs, omit this line.
import os

os.environ.setdefault("POCL_DEVICES", "pthread pthread")

import matplotlib.pyplot as plt
import skimage

import arraybridge as ab
from arraybridge.testing import inject_oom

print(ab.devices("pyclesperanto"))

# %%
# Stage one finds seeds
# ---------------------
# The detector uses PyTorch. It takes large intermediate arrays from a pool, which keeps
# them for the next image.

coins = skimage.util.img_as_float32(skimage.data.coins())
pool = ab.BufferPool(max_bytes=512 << 20)


@ab.torch(output_type="numpy")
def detect(image):
    """Return the probability of a coin per pixel: (h, w) float32, 0 to 1."""
    import torch
    from torch.nn.functional import avg_pool2d

    shape = (32, *image.shape)
    features = pool.take(shape, "float32", "torch")
    for i, layer in enumerate(features):
        size = 2 * (i % 8) + 1
        blurred = avg_pool2d(image[None, None], size, stride=1, padding=size // 2)
        layer[:] = blurred[0, 0]
    score = torch.sigmoid(25 * (features.mean(dim=0) - 0.45))
    pool.give(features)
    return score


score = detect(coins)


# %%
# Stage two needs the memory
# --------------------------
# ``free_memory()`` releases the caches of every loaded framework, and returns the
# number of bytes. On a GPU, this includes the cached blocks of PyTorch and CuPy.
# ``free_memory("torch", 0)`` releases those of one framework on one GPU.

freed = [ab.free_memory(), ab.free_memory()]
print(f"released: {freed[0] / 2**20:.0f} MiB; the second time: {freed[1]} bytes")
assert freed[0] >= 32 * coins.nbytes


@ab.pyclesperanto(gpu_id=1, output_type="numpy")
def segment(score):
    """Return numbered objects; runs on the second device."""
    import pyclesperanto as cle

    mask = cle.gaussian_blur(score, sigma_x=2, sigma_y=2) > 0.8
    return cle.remove_small_labels(
        cle.connected_component_labeling(mask), minimum_size=200
    )


labels = segment(score)
print(f"{labels.max():.0f} objects")

# %%
# Release memory automatically
# ----------------------------
# With ``oom_recovery=True``, a function that runs out of memory releases the caches of
# *all* frameworks and runs again. ``inject_oom`` makes the first attempt fail with the
# framework's own error.

detect(coins)  # the pool is full again


@ab.torch(output_type="numpy", oom_recovery=True)
def edges(image):
    import torch

    return torch.hypot(
        image[1:, :-1] - image[:-1, :-1], image[:-1, 1:] - image[:-1, :-1]
    )


with inject_oom("torch", count=1) as simulation:
    outline = edges(coins)
print("attempts:", len(simulation.attempts))
print("idle in the pool now:", ab.free_memory(), "bytes")

# %%
# The result
# ----------

figure, axes = plt.subplots(2, 1, figsize=(4.8, 6.6), layout="constrained")
axes[0].imshow(score, cmap="magma")
axes[0].set_title("Stage one, PyTorch: probability of a coin", size=11)
axes[1].imshow(skimage.color.label2rgb(labels.astype(int), coins, bg_label=0))
axes[1].set_title("Stage two, OpenCL device 1: objects", size=11)
for axis in axes:
    axis.axis("off")
plt.show()

# %%
# On a GPU, put two more calls at the top of the program: ``arraybridge.coexist()``,
# before JAX or TensorFlow allocate the whole GPU, and
# ``arraybridge.share_gpu_memory("torch")``, which gives PyTorch and CuPy one pool. See
# :doc:`/memory`.
