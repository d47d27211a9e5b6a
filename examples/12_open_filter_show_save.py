"""
Open, filter, plot, save
========================

The first steps with xarray, SimpleITK, Pillow, zarr, h5py, pandas, polars and a raw
file. One filter, written in PyTorch, accepts the objects of all of them.
"""

# %%
# The filter smooths along the first axis.
import mmap
import tempfile
from pathlib import Path

import h5py
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import polars as pl
import SimpleITK as sitk
import xarray as xr
import zarr
from PIL import Image

import arraybridge as ab

folder = tempfile.TemporaryDirectory()
path = Path(folder.name)


@ab.torch(output_type="input", dtype="float32")
def smooth(x):
    y = x.clone()
    y[1:-1] = (x[:-2] + x[1:-1] + x[2:]) / 3
    return y


# %%
# xarray
# ------
# Coordinates and attributes are restored. ``xr.open_dataarray`` opens a NetCDF file.
scan = xr.DataArray(
    np.random.default_rng(0).random((40, 3), np.float32),
    dims=("time", "x"),
    coords={"time": np.arange(40) * 0.5},
    attrs={"units": "mV"},
)
scan.to_dataset(name="scan").to_zarr(path / "scan.zarr", consolidated=False)

scan = xr.open_zarr(path / "scan.zarr", chunks=None, consolidated=False)["scan"]
clean = smooth(scan)
figure, axis = plt.subplots(figsize=(4.8, 2.8), layout="constrained")
clean.plot.line(ax=axis, x="time", add_legend=False)
axis.set_title("xarray: three channels, smoothed", size=11)
clean.to_dataset(name="scan").to_zarr(path / "clean.zarr", consolidated=False)

assert clean.attrs == {"units": "mV"}
saved = xr.open_zarr(path / "clean.zarr", chunks=None, consolidated=False)["scan"]
assert saved.identical(clean)

# %%
# SimpleITK
# ---------
# The spacing is restored, so the plot is in millimeters.
head = sitk.GaussianSource(
    sitk.sitkInt16, size=(20, 16, 12), sigma=(5, 5, 5), mean=(10, 8, 6)
)
head.SetSpacing((0.5, 0.5, 2.0))
sitk.WriteImage(head, path / "head.nrrd")

image = sitk.ReadImage(path / "head.nrrd")
result = smooth(image)
(width, height, _), (dx, dy, _) = result.GetSize(), result.GetSpacing()
figure, axis = plt.subplots(figsize=(4.8, 3.6), layout="constrained")
axis.imshow(
    sitk.GetArrayViewFromImage(result)[6], extent=(0, width * dx, height * dy, 0)
)
axis.set_title("SimpleITK: a slice, in millimeters", size=11)
sitk.WriteImage(result, path / "smooth.nrrd")

assert sitk.ReadImage(path / "smooth.nrrd").GetSpacing() == (0.5, 0.5, 2.0)

# %%
# Pillow
# ------
# If the function preserves the dtype of the pixels, the result is an image.
Image.linear_gradient("L").convert("RGB").save(path / "ramp.png", dpi=(300, 300))


@ab.torch(output_type="input")
def negative(x):
    return 255 - x


photo = Image.open(path / "ramp.png")
result = negative(photo)
figure, axis = plt.subplots(figsize=(4.8, 3.6), layout="constrained")
axis.imshow(result)  # or result.show()
axis.set_title("Pillow: a negative", size=11)
result.save(path / "negative.png", dpi=result.info["dpi"])

assert Image.open(path / "negative.png").getpixel((0, 0)) == (255, 255, 255)

# %%
# zarr and h5py
# -------------
# The file is read, and the result is a NumPy array.
zarr.save(path / "stack.zarr", np.ones((6, 8), "float32"))
result = smooth(zarr.open(path / "stack.zarr", mode="r"))
zarr.save(path / "smooth.zarr", result)

with h5py.File(path / "stack.h5", "w") as h5:
    h5["stack"] = result
with h5py.File(path / "stack.h5", "r+") as h5:
    h5["smooth"] = smooth(h5["stack"])
    print(h5["smooth"])

# %%
# pandas and polars
# -----------------
(path / "run.csv").write_text(",volts,amps\na,0.0,1.0\nb,3.0,1.0\nc,0.0,4.0\n")

table = pd.read_csv(path / "run.csv", index_col=0)
result = smooth(table)
print(result)
result.to_csv(path / "smooth.csv")

frame = pl.read_csv(path / "run.csv")
frame = frame.with_columns(smooth(frame["volts"]))
print(frame["volts"].to_list())
frame.write_csv(path / "smooth.csv")

# %%
# A raw file
# ----------
# The file is mapped, so only the accessed part is read.
(path / "raw.u16").write_bytes(np.arange(12, dtype="uint16").tobytes())

with (path / "raw.u16").open("r+b") as opened:
    raw = mmap.mmap(opened.fileno(), 0)
    result = smooth(memoryview(raw).cast("H", (3, 4)))
print(result[1])
(path / "smooth.f32").write_bytes(result)
folder.cleanup()
plt.show()

# %%
# :doc:`/carriers` lists which objects are shared, copied and restored.
