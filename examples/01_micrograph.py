"""
One micrograph, three libraries
===============================

Stain separation comes from scikit-image, a band-pass filter from pyclesperanto, a
sharpening filter from torch. Each function is written for its own library, and one
decorator makes it take any array.
"""

# %%
# The picture is a tissue section, stained with haematoxylin (blue nuclei) and DAB
# (brown).
import matplotlib.pyplot as plt
import numpy as np
import skimage

import arraybridge as ab

tissue = (
    skimage.data.immunohistochemistry()
)  # (512, 512, 3), uint8, in scikit-image's own wheel
print(tissue.shape, tissue.dtype)


# %%
# Each function in its own library
# --------------------------------
# The decorator names the framework that the function is written in. Arrays are
# converted on the way in; the result stays in that framework until something else asks
# for it.


@ab.numpy
def nuclei(image):
    """How much haematoxylin is in each pixel: (h, w, 3) uint8 to (h, w)."""
    return skimage.color.rgb2hed(image)[..., 0].astype(np.float32)


@ab.pyclesperanto
def band_pass(image):
    """Keep what is about as large as a nucleus, and drop the background."""
    import pyclesperanto as cle

    return cle.difference_of_gaussian(
        image, sigma1_x=2, sigma1_y=2, sigma2_x=12, sigma2_y=12
    )


@ab.torch(output_type="numpy")
def sharpened(image):
    """Add what a 3 × 3 mean takes away."""
    import torch

    batch = image[None, None]
    mean = torch.nn.functional.avg_pool2d(batch, 3, stride=1, padding=1)[0, 0]
    return image + 1.5 * (image - mean)


# %%
# Call them one after the other, and let a trace tell how the picture travelled: uint8
# in NumPy, through OpenCL memory, into torch, and back.

with ab.trace() as log:
    stain = nuclei(tissue)
    blobs = band_pass(stain)
    result = sharpened(blobs)
print(log)

# %%
# What came out
# -------------
# The result is a NumPy array, ready for scikit-image again.

labels = skimage.measure.label(result > skimage.filters.threshold_otsu(result))
sizes = np.bincount(labels.ravel())[1:]
print(f"{(sizes > 40).sum()} nuclei of more than 40 pixels")

figure, axes = plt.subplots(2, 2, figsize=(4.8, 5.2), layout="constrained")
outlined = skimage.segmentation.mark_boundaries(tissue, labels, color=(1, 1, 0))
pictures = {
    "tissue": (tissue, None),
    "haematoxylin (scikit-image)": (stain, "magma"),
    "band-pass (pyclesperanto)": (ab.to_numpy(blobs), "magma"),
    "nuclei found (torch, NumPy)": (outlined, None),
}
for axis, (title, (picture, colours)) in zip(axes.flat, pictures.items(), strict=True):
    axis.imshow(picture[100:356, 100:356], cmap=colours)
    axis.set_title(title, size=10)
    axis.axis("off")
plt.show()

# %%
# On a machine with a card, ``@arraybridge.torch(gpu_id=0)`` moves the last step there;
# nothing else changes.
