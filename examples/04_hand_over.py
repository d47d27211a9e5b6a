"""
Two libraries take turns on one card
====================================

A detector in one framework fills the card, and the segmentation that comes next, in
another, finds no room: the first keeps its memory as a cache. This is what happens with
a star-convex detector in TensorFlow before a network in torch. Here is the hand-over,
rehearsed without a card: two OpenCL devices stand in for two cards, and the lack of
memory is injected.
"""

# %%
# PoCL shows the processor as two OpenCL devices. On a machine with cards, leave this
# line out.
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
# It works in torch, and draws its large intermediate arrays from a pool, which keeps
# them for the next image.

coins = skimage.util.img_as_float32(skimage.data.coins())
pool = ab.BufferPool(max_bytes=512 << 20)


@ab.torch(output_type="numpy")
def detect(image):
    """Where a coin may be: (h, w) float32 in 0 … 1."""
    import torch
    from torch.nn.functional import avg_pool2d

    shape = (32, *image.shape)
    features = pool.take(shape, "float32", "torch")
    for i, layer in enumerate(features):
        size = 2 * (i % 8) + 1
        layer[:] = avg_pool2d(image[None, None], size, stride=1, padding=size // 2)[
            0, 0
        ]
    score = torch.sigmoid(25 * (features.mean(dim=0) - 0.45))
    pool.give(features)
    return score


score = detect(coins)


# %%
# Stage two wants the room
# ------------------------
# ``free_memory()`` gives back the caches of every loaded framework, and says how much
# it was. On a card that is torch's and CuPy's cached blocks too; ``free_memory("torch",
# 0)`` asks one framework, for one card.

freed = [ab.free_memory(), ab.free_memory()]
print(f"given back: {freed[0] / 2**20:.0f} MiB; a second time: {freed[1]} bytes")
assert freed[0] >= 32 * coins.nbytes


@ab.pyclesperanto(gpu_id=1, output_type="numpy")
def segment(score):
    """Numbered objects, on the second device."""
    import pyclesperanto as cle

    mask = cle.gaussian_blur(score, sigma_x=2, sigma_y=2) > 0.8
    return cle.remove_small_labels(
        cle.connected_component_labeling(mask), minimum_size=200
    )


labels = segment(score)
print(f"{labels.max():.0f} objects")

# %%
# Nobody has to call it
# ---------------------
# With ``oom_recovery=True`` the function that finds no room frees what the *other*
# frameworks hold, and runs again. ``inject_oom`` lets the first attempt fail with the
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
axes[0].set_title("Stage one, torch: where a coin may be", size=11)
axes[1].imshow(skimage.color.label2rgb(labels.astype(int), coins, bg_label=0))
axes[1].set_title("Stage two, OpenCL device 1: objects", size=11)
for axis in axes:
    axis.axis("off")
plt.show()

# %%
# Two more calls belong at the top of such a program on a card:
# ``arraybridge.coexist()``, before JAX or TensorFlow take all of it, and
# ``arraybridge.share_gpu_memory("torch")``, which gives torch and CuPy one pool. See
# :doc:`/memory`.
