"""
xarray and zarr, in and out
===========================

A labelled stack lies in a zarr store in chunks. ``xarray.apply_ufunc`` sends each chunk
through a function that is written in torch, and the result goes into a store again,
with its labels. Dask does the scheduling.
"""

# %%
# A stack with names for its axes, written in chunks of four images.
import tempfile

import matplotlib.pyplot as plt
import numpy as np
import skimage
import xarray as xr

import arraybridge

folder = tempfile.TemporaryDirectory()
coins = skimage.util.img_as_float32(skimage.data.coins())
rng = np.random.default_rng(0)
stack = xr.DataArray(
    np.stack([coins + rng.normal(0, 0.15, coins.shape) for _ in range(12)]).astype(
        np.float32
    ),
    dims=("time", "y", "x"),
    coords={"time": np.arange(12) * 0.5},
    name="coins",
    attrs={"units": "of full scale"},
)
stack.chunk(time=4).to_zarr(f"{folder.name}/noisy.zarr", consolidated=False)


# %%
# A function in torch
# -------------------
# ``output_type="input"`` gives NumPy back for NumPy, which is what xarray wants.


@arraybridge.torch(output_type="input")
def median(images):
    """The median of each pixel and its 24 neighbours. (n, h, w)"""
    import torch

    padded = torch.nn.functional.pad(images, (2, 2, 2, 2), mode="replicate")
    return padded.unfold(1, 5, 1).unfold(2, 5, 1).flatten(3).median(dim=3).values


# %%
# Through apply_ufunc
# -------------------
# Nothing is computed before ``to_zarr`` asks for it; then each chunk is read,
# converted, filtered and written.

noisy = xr.open_zarr(f"{folder.name}/noisy.zarr", consolidated=False)["coins"]
clean = xr.apply_ufunc(
    median, noisy, dask="parallelized", output_dtypes=[noisy.dtype], keep_attrs=True
)
clean.to_zarr(f"{folder.name}/clean.zarr", consolidated=False)

result = xr.open_zarr(f"{folder.name}/clean.zarr", consolidated=False)["coins"].load()
print(result.sel(time=1.5).mean().item(), result.attrs)
assert np.array_equal(result.values[:1], median(stack.values[:1]))

# %%
# A table or labelled array by itself is refused, with the expression to write: its
# labels would be lost in a tensor without a word.

try:
    arraybridge.to_torch(stack)
except arraybridge.UnknownArrayError as error:
    print(error)

# %%
# The pictures
# ------------

figure, axes = plt.subplots(2, 1, figsize=(4.8, 6.8), layout="constrained")
pictures = {"from the store": noisy, "filtered, in a store again": result}
for axis, (title, picture) in zip(axes, pictures.items(), strict=True):
    picture.sel(time=1.5).plot.imshow(
        ax=axis, cmap="gray", vmin=0, vmax=1, add_colorbar=False, yincrease=False
    )
    axis.set_title(f"{title} (time = 1.5)", size=11)
folder.cleanup()
plt.show()

# %%
# A filter that looks beyond the edge of its chunk needs a margin: :doc:`/dask` shows
# ``map_overlap``.
