"""
xarray and zarr, in and out
===========================

A filter written in torch takes an ``xarray.DataArray`` as it is, and gives one back,
with its coordinates and attributes. A zarr array that is larger than memory goes
through chunk by chunk.
"""

# %%
# A stack with names for its axes.
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
# A function in torch
# -------------------
# ``output_type="input"`` gives back what the caller brought.


@ab.torch(output_type="input")
def median(images):
    """The median of each pixel and its 24 neighbours. (n, h, w)"""
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
# ``chunks`` reads a zarr array in whole chunks, and ``prefetch`` reads the next one
# while this one is filtered. The results go into a second array.

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
# The pictures
# ------------

figure, axes = plt.subplots(2, 1, figsize=(4.8, 6.8), layout="constrained")
pictures = {"noisy": stack, "filtered, by way of a file": result}
for axis, (title, picture) in zip(axes, pictures.items(), strict=True):
    picture.sel(time=1.5).plot.imshow(
        ax=axis, cmap="gray", vmin=0, vmax=1, add_colorbar=False, yincrease=False
    )
    axis.set_title(f"{title} (time = 1.5)", size=11)
folder.cleanup()
plt.show()

# %%
# :doc:`/carriers` lists what else can be passed. A filter that looks beyond the edge of
# its chunk needs a margin: :doc:`/dask` shows ``map_overlap``.
