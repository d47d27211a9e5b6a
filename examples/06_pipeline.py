"""
A pipeline of three stages, and its timeline
============================================

While the third stage works on one image, the second works on the next and the first on
the one after. ``Pipeline`` runs each stage in a thread of its own; its report says
which stage the others wait for.
"""

# %%
# Three stages, two frameworks
# ----------------------------
# Each stage is an ordinary decorated function. Between them, images go from framework
# to framework as everywhere else.
import matplotlib.pyplot as plt
import numpy as np
import skimage

import arraybridge as ab

photograph = skimage.util.img_as_float32(skimage.data.camera())
images = [np.roll(photograph, 16 * i, axis=1) for i in range(12)]


@ab.torch
def denoise(image):
    """The median of each pixel and its eight neighbours."""
    import torch

    padded = torch.nn.functional.pad(image[None, None], (1, 1, 1, 1), mode="replicate")
    return padded.unfold(2, 3, 1).unfold(3, 3, 1).flatten(4).median(dim=4).values[0, 0]


@ab.jax
def edges(image):
    """How steep the picture is at each pixel."""
    import jax.numpy as jnp

    dy, dx = jnp.gradient(image)
    return jnp.hypot(dy, dx)


@ab.numpy
def measure(image):
    """How much of the picture is edge, by a threshold of its own."""
    return (image > skimage.filters.threshold_li(image)).mean()


# %%
# One after the other, and as a pipeline
# --------------------------------------

one_by_one = [measure(edges(denoise(image))) for image in images]

pipeline = ab.Pipeline(denoise, edges, measure)
results = list(pipeline.map(images))
assert results == one_by_one  # in order, and the same

report = pipeline.report()
print(report)

# %%
# The timeline
# ------------
# A row for each stage, a bar for each image, with its number. Where a row is full, the
# others wait for it: that is the stage to make faster.

figure, axis = plt.subplots(figsize=(4.8, 3.2), layout="constrained")
colours = plt.get_cmap("Set3").colors
for row, stage in enumerate(report.stages):
    for span in stage.spans:
        length = span.end - span.start
        axis.barh(row, length, left=span.start, color=colours[span.item], height=0.7)
        if length > report.seconds / 30:
            middle = span.start + length / 2
            axis.text(middle, row, str(span.item), ha="center", va="center", size=9)
axis.set_yticks(range(3), [stage.name for stage in report.stages])
axis.invert_yaxis()
axis.set_xlabel("seconds")
axis.set_title("When each stage works on which image", size=11)
plt.show()

# %%
# ``report.plot("run.png")`` draws the same into a file, and ``trace()`` around a run
# also records what is between the stages: ``log.plot()``, and ``log.save("run.json")``
# for Perfetto. On a machine with cards, a stage names its own:
# ``@arraybridge.torch(gpu_id=0)``. See :doc:`/devices`.
