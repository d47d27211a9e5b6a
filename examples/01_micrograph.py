"""
One micrograph, three libraries
===============================

Separate stains with scikit-image, filter with pyclesperanto, and sharpen with PyTorch.
Each function is written for one library, and a decorator makes it accept any array.
"""

# %%
# The image shows a tissue section, stained with hematoxylin (blue nuclei) and DAB
# (brown).
import matplotlib.pyplot as plt
import numpy as np
import skimage

import arraybridge as ab

tissue = skimage.data.immunohistochemistry()  # a file in scikit-image's wheel
print(tissue.shape, tissue.dtype)


# %%
# One function per library
# ------------------------
# The decorator names the framework of the function. Arguments are converted to it. The
# result stays in that framework unless ``output_type`` names another one.


@ab.numpy
def nuclei(image):
    """Return the amount of hematoxylin per pixel: (h, w, 3) uint8 to (h, w)."""
    return skimage.color.rgb2hed(image)[..., 0].astype(np.float32)


@ab.pyclesperanto
def band_pass(image):
    """Keep structures of the size of a nucleus, and remove the background."""
    import pyclesperanto as cle

    return cle.difference_of_gaussian(
        image, sigma1_x=2, sigma1_y=2, sigma2_x=12, sigma2_y=12
    )


@ab.torch(output_type="numpy")
def sharpened(image):
    """Amplify the difference from a 3 × 3 mean."""
    import torch

    batch = image[None, None]
    mean = torch.nn.functional.avg_pool2d(batch, 3, stride=1, padding=1)[0, 0]
    return image + 1.5 * (image - mean)


# %%
# Call the functions in a trace, which records each conversion: from NumPy to OpenCL
# memory, to PyTorch, and back.

with ab.trace() as log:
    stain = nuclei(tissue)
    blobs = band_pass(stain)
    result = sharpened(blobs)
print(log)

# %%
# The result
# ----------
# The result is a NumPy array, which scikit-image accepts.

labels = skimage.measure.label(result > skimage.filters.threshold_otsu(result))
sizes = np.bincount(labels.ravel())[1:]
print(f"{(sizes > 40).sum()} nuclei of more than 40 pixels")

figure, axes = plt.subplots(2, 2, figsize=(4.8, 5.2), layout="constrained")
outlined = skimage.segmentation.mark_boundaries(tissue, labels, color=(1, 1, 0))
panels = {
    "tissue": (tissue, None),
    "hematoxylin (scikit-image)": (stain, "magma"),
    "band-pass (pyclesperanto)": (ab.to_numpy(blobs), "magma"),
    "nuclei (PyTorch, NumPy)": (outlined, None),
}
for axis, (title, (image, colors)) in zip(axes.flat, panels.items(), strict=True):
    axis.imshow(image[100:356, 100:356], cmap=colors)
    axis.set_title(title, size=10)
    axis.axis("off")
plt.show()

# %%
# On a machine with a GPU, ``@arraybridge.torch(gpu_id=0)`` runs the last step on it.
# Nothing else changes.
