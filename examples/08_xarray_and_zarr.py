"""
Filter xarray and zarr data
===========================

A filter written in PyTorch accepts an ``xarray.DataArray`` and returns one, with its
coordinates and attributes. A zarr array that is larger than memory is processed in
chunks.
"""

# %%
# The data is a stack of images with named axes.
import tempfile

import matplotlib.pyplot as plt
import numpy as np
import skimage
import xarray as xr
import zarr

import arraybridge as ab

coins = skimage.util.img_as_float32(skimage.data.coins())
rng = np.random.default_rng(0)
noisy = [coins + rng.normal(0, 0.15, coins.shape) for _ in range(12)]
stack = xr.DataArray(
    np.stack(noisy).astype(np.float32),
    dims=("time", "y", "x"),
    coords={"time": np.arange(12) * 0.5},
    name="coins",
    attrs={"units": "of full scale"},
)

# %%
# A function in PyTorch
# ---------------------
# ``output_type="input"`` restores the caller's type.


@ab.torch(output_type="input")
def median(images):
    """Return the median of each pixel and its 24 neighbors. images: (n, h, w)."""
    import torch

    padded = torch.nn.functional.pad(images, (2, 2, 2, 2), mode="replicate")
    return padded.unfold(1, 5, 1).unfold(2, 5, 1).flatten(3).median(dim=3).values


clean = median(stack[:4])
print(type(clean).__name__, clean.dims, clean.attrs)
print(clean.sel(time=1.5).mean().item())
print(ab.explain(stack, "torch"))

# %%
# A file larger than memory
# -------------------------
# ``chunks`` reads a zarr array in whole chunks. ``prefetch`` reads the next chunk while
# the current one is filtered. The results are written to a second array.

folder = tempfile.TemporaryDirectory()
source = zarr.create_array(
    f"{folder.name}/noisy.zarr", data=stack.values, chunks=(4, *coins.shape)
)
out = zarr.create_array(
    f"{folder.name}/clean.zarr",
    shape=source.shape,
    chunks=source.chunks,
    dtype=source.dtype,
)
row = 0
for images in ab.prefetch(ab.chunks(source), "torch"):
    out[row : row + len(images)] = ab.to_numpy(median(images))
    row += len(images)

result = stack.copy(data=out[:])
assert np.array_equal(result[:4].values, clean.values)

# %%
# The images
# ----------

figure, axes = plt.subplots(2, 1, figsize=(4.8, 6.8), layout="constrained")
images = {"noisy": stack, "filtered through a file": result}
for axis, (title, image) in zip(axes, images.items(), strict=True):
    image.sel(time=1.5).plot.imshow(
        ax=axis, cmap="gray", vmin=0, vmax=1, add_colorbar=False, yincrease=False
    )
    axis.set_title(f"{title} (time = 1.5)", size=11)
folder.cleanup()
plt.show()

# %%
# :doc:`/carriers` lists the other supported objects. A filter that needs values beyond
# the edge of its chunk needs a margin: :doc:`/dask` shows ``map_overlap``.
