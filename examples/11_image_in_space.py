"""
A medical image in millimeters
==============================

A ``SimpleITK.Image`` stores the size of its voxels and its position. A filter written
in PyTorch accepts it, and the result has the same spacing, origin and metadata.
"""

# %%
# The image
# ---------
# A scan has thick slices: here, voxels measure 0.5 mm within a slice, and 2 mm between
# slices. The scan shows a ball of 8 mm radius, with noise.
import matplotlib.pyplot as plt
import numpy as np
import SimpleITK as sitk

import arraybridge as ab

spacing = (0.5, 0.5, 2.0)  # x, y, z
z, y, x = np.ogrid[0:15, 0:60, 0:60]
radius = np.hypot(np.hypot((x - 30) * 0.5, (y - 30) * 0.5), (z - 7) * 2.0)
noise = np.random.default_rng(0).normal(0, 0.4, radius.shape)
scan = sitk.GetImageFromArray(((radius < 8) + noise).astype(np.float32))
scan.SetSpacing(spacing)
scan.SetOrigin((-15.0, -15.0, 100.0))
scan.SetMetaData("PatientName", "Phantom")

# %%
# The filter
# ----------
# A blur of 1 mm has a different width in voxels along each axis. The function receives
# a tensor with the axes z, y, x. The widths are passed as numbers.


@ab.torch(output_type="input")
def blur(volume, sigma):
    """Apply a Gaussian blur. volume: (z, y, x); sigma in voxels, one per axis."""
    import torch

    blurred = volume[None, None]
    for axis, width in enumerate(sigma):
        reach = int(np.ceil(3 * width))
        steps = torch.arange(-reach, reach + 1, dtype=volume.dtype)
        weights = torch.exp(-0.5 * (steps / width) ** 2)
        shape = [1, 1, 1, 1, 1]
        shape[2 + axis] = len(weights)
        kernel = (weights / weights.sum()).reshape(shape)
        blurred = torch.nn.functional.conv3d(blurred, kernel, padding="same")
    return blurred[0, 0]


smooth = blur(scan, [1.0 / size for size in reversed(scan.GetSpacing())])

print(type(smooth).__name__, smooth.GetSpacing(), smooth.GetOrigin())
print(smooth.GetMetaData("PatientName"))
assert smooth.GetSpacing() == spacing

# %%
# Measure in millimeters
# ----------------------
# SimpleITK accepts the result. The volume of a ball of 8 mm radius is 2145 mm³.

measured = sitk.LabelShapeStatisticsImageFilter()
measured.Execute(sitk.ConnectedComponent(smooth > 0.5))
largest = max(measured.GetLabels(), key=measured.GetPhysicalSize)
print(f"{measured.GetPhysicalSize(largest):.0f} mm³")
print([round(c, 1) for c in measured.GetCentroid(largest)])

# %%
# SimpleITK exports no memory that outlives its image, so the image is copied once:

print(ab.explain(scan, "torch"))

# %%
# The images
# ----------
# A section from front to back, to scale. The origin is the center of a voxel.

figure, axes = plt.subplots(2, 1, figsize=(4.8, 8.4), layout="constrained")
left, _, bottom = (o - s / 2 for o, s in zip(scan.GetOrigin(), spacing, strict=True))
width, _, height = (n * s for n, s in zip(scan.GetSize(), spacing, strict=True))
extent = (left, left + width, bottom, bottom + height)
for axis, (title, image) in zip(
    axes, {"as scanned": scan, "blurred by 1 mm": smooth}.items(), strict=True
):
    section = ab.to_numpy(image)[:, 30]
    axis.imshow(
        section, cmap="gray", vmin=-0.5, vmax=1.5, extent=extent, origin="lower"
    )
    axis.set_title(title, size=11)
    axis.set(xlabel="x in mm", ylabel="z in mm")
plt.show()
