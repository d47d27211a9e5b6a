"""
A pipeline of three stages
==========================

``Pipeline`` runs each stage in a separate thread. While the third stage processes one
image, the second processes the next one. The report shows which stage is the slowest.
"""

# %%
# Three stages, two frameworks
# ----------------------------
# Each stage is an ordinary decorated function. Images are converted between stages.
import matplotlib.pyplot as plt
import numpy as np
import skimage

import arraybridge as ab

photograph = skimage.util.img_as_float32(skimage.data.camera())
images = [np.roll(photograph, 16 * i, axis=1) for i in range(12)]


@ab.torch
def denoise(image):
    """Return the median of each pixel and its eight neighbors."""
    import torch

    padded = torch.nn.functional.pad(image[None, None], (1, 1, 1, 1), mode="replicate")
    return padded.unfold(2, 3, 1).unfold(3, 3, 1).flatten(4).median(dim=4).values[0, 0]


@ab.jax
def edges(image):
    """Return the magnitude of the gradient at each pixel."""
    import jax.numpy as jnp

    dy, dx = jnp.gradient(image)
    return jnp.hypot(dy, dx)


@ab.numpy
def measure(image):
    """Return the fraction of edge pixels, with an automatic threshold."""
    return (image > skimage.filters.threshold_li(image)).mean()


# %%
# Sequentially, and as a pipeline
# -------------------------------

sequential = [measure(edges(denoise(image))) for image in images]

pipeline = ab.Pipeline(denoise, edges, measure)
results = list(pipeline.map(images))
assert results == sequential  # in order, and equal

report = pipeline.report()
print(report)

# %%
# A plot of the run
# -----------------
# Each row is a stage, and each bar is an image with its number. The stage whose row is
# full is the one to make faster, because the others wait for it.

figure, axis = plt.subplots(figsize=(4.8, 3.2), layout="constrained")
colors = plt.get_cmap("tab20").colors
for row, stage in enumerate(report.stages):
    for span in stage.spans:
        length = span.end - span.start
        axis.barh(row, length, left=span.start, color=colors[span.item], height=0.7)
        if length > report.seconds / 30:
            middle = span.start + length / 2
            axis.text(middle, row, str(span.item), ha="center", va="center", size=9)
axis.set_yticks(range(3), [stage.name for stage in report.stages])
axis.invert_yaxis()
axis.set_xlabel("seconds")
axis.set_title("When each stage processes which image", size=11)
plt.show()

# %%
# ``report.plot("run.png")`` writes this plot to a file. ``trace()`` around a run also
# records the conversions between stages: see ``log.plot()``, and
# ``log.save("run.json")`` for Perfetto. On a machine with GPUs, each stage names one:
# ``@arraybridge.torch(gpu_id=0)``. See :doc:`/parallel`.
