"""
Out of memory: retry and split
==============================

If a batch does not fit into memory, ``oom_recovery="split"`` processes it in parts.
Completed parts are kept. ``inject_oom`` simulates a small GPU: each attempt with too
many rows fails with PyTorch's own error.
"""

# %%
# The memory of this function grows with the batch: for each image, it computes the
# maximum over 25 shifted copies.
import matplotlib.pyplot as plt
import numpy as np
import skimage

import arraybridge as ab
from arraybridge.testing import inject_oom

camera = skimage.util.img_as_float32(skimage.data.camera())
images = np.stack([np.roll(camera, 5 * i, axis=1) for i in range(48)])[:, ::4, ::4]
print(images.shape)


@ab.torch(output_type="input", oom_recovery="split")
def widened(images):
    """Return the maximum of each 5 × 5 neighborhood. images: (n, h, w)."""
    import torch

    shifts = [
        torch.roll(images, (dy, dx), (1, 2))
        for dy in range(-2, 3)
        for dx in range(-2, 3)
    ]
    return torch.stack(shifts).amax(dim=0)  # 25 times the memory


whole = widened(images)

# %%
# A GPU that holds 10 images
# --------------------------

with inject_oom("torch", above_rows=10) as simulation:
    in_parts = widened(images)

print("rows of each attempt:", simulation.attempts)
print("attempts that failed:", simulation.raised)
assert np.array_equal(in_parts, whole)  # bit for bit
assert simulation.attempts == sorted(simulation.attempts, reverse=True)  # never grows

# %%
# The parts
# ---------
# From the top: the whole batch fails, and fails again after all caches were freed. Then
# the size is halved until a part fits. That size is used for the rest of the batch.

figure, axis = plt.subplots(figsize=(4.8, 3.6), layout="constrained")
first = 0
for attempt, rows in enumerate(simulation.attempts):
    fits = rows <= 10
    axis.barh(
        attempt,
        rows,
        left=first,
        color="#1b7a2f" if fits else "#c0272d",
        edgecolor="white",
    )
    axis.text(
        first + rows / 2,
        attempt,
        str(rows),
        ha="center",
        va="center",
        color="white",
        size=9,
    )
    first += rows if fits else 0
assert first == len(images)
axis.invert_yaxis()
axis.set(xlabel="images of the batch", ylabel="attempt", xlim=(0, len(images)))
axis.set_title("Red: did not fit. Green: completed and kept.", size=11)
plt.show()

# %%
# Each step is logged to ``arraybridge.memory`` at level ``INFO``. :doc:`/memory`
# describes which functions can be split, and how to exempt an argument.
