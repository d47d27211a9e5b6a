"""Random arrays in random carriers, through a function and back: bit-equal, with all that belongs to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import arraybridge as ab
from tests.helpers import require

torch = require("torch")
xarray = pytest.importorskip("xarray")
pandas = pytest.importorskip("pandas")
polars = pytest.importorskip("polars")
sitk = pytest.importorskip("SimpleITK")

#: Dtypes for which SimpleITK has pixels.
PIXELS = ("uint8", "int16", "uint16", "int32", "int64", "uint64", "float32", "float64", "complex64")
DTYPES = ("bool", "float16", *PIXELS)


@ab.torch(output_type="input")
def through_torch(x: Any) -> Any:
    assert isinstance(x, torch.Tensor)
    return x.clone()


@st.composite
def values(draw: Any, dtypes: tuple[str, ...] = DTYPES, ndim: tuple[int, int] = (1, 3)) -> Any:
    """An array of any bits, in C or Fortran order, reversed, or with steps."""
    shape = draw(arrays.array_shapes(min_dims=ndim[0], max_dims=ndim[1], max_side=5))
    x = draw(arrays.arrays(draw(st.sampled_from(dtypes)), shape))
    layout = draw(st.sampled_from(("C", "F", "reversed", "steps", "transposed")))
    if layout == "F":
        return np.asfortranarray(x)
    if layout == "reversed":
        return x[::-1]
    if layout == "steps":
        return np.repeat(x, 2, axis=-1)[..., ::2]
    return x.T if layout == "transposed" else x


def same(x: Any, expected: Any) -> None:
    """Bit for bit, NaNs and signs of zero included."""
    x, expected = np.asarray(x), np.asarray(expected)
    assert (x.dtype, x.shape) == (expected.dtype, expected.shape)
    assert x.tobytes() == expected.tobytes()


@settings(max_examples=60)
@given(x=values(), data=st.data())
def test_xarray(x: Any, data: Any) -> None:
    dims = [f"d{i}" for i in range(x.ndim)]
    named = data.draw(st.sets(st.sampled_from(dims)))
    coords = {dim: np.arange(x.shape[dims.index(dim)]) * 0.5 for dim in named}
    carrier = xarray.DataArray(x, dims=dims, coords=coords, name="x", attrs={"unit": "mm"})
    result = through_torch(carrier)
    same(result.data, x)
    assert result.coords.equals(carrier.coords)
    assert (result.dims, result.name, result.attrs) == (carrier.dims, "x", {"unit": "mm"})


@settings(max_examples=60)
@given(x=values(PIXELS, (2, 3)), spacing=st.floats(0.1, 10))
def test_simpleitk(x: Any, spacing: float) -> None:
    image = sitk.GetImageFromArray(np.ascontiguousarray(x))
    image.SetSpacing([spacing] * x.ndim)
    image.SetMetaData("key", "value")
    result = through_torch(image)
    same(sitk.GetArrayFromImage(result), x)
    assert result.GetPixelID() == image.GetPixelID()
    assert result.GetSpacing() == image.GetSpacing()
    assert result.GetMetaData("key") == "value"


@settings(max_examples=60)
@given(x=values(DTYPES[:-1], (1, 2)), data=st.data())
def test_pandas(x: Any, data: Any) -> None:
    index = data.draw(st.permutations([f"r{i}" for i in range(len(x))]))
    if x.ndim == 1:
        carrier, compare = pandas.Series(x, index=index, name="s"), pandas.testing.assert_series_equal
    else:
        carrier = pandas.DataFrame(x, index=index, columns=[f"c{i}" for i in range(x.shape[1])])
        compare = pandas.testing.assert_frame_equal
    result = through_torch(carrier)
    compare(result, carrier, check_exact=True)
    same(result.to_numpy(), x)


@settings(max_examples=40)
@given(x=values(("bool", *PIXELS[:-1]), (1, 1)))
def test_polars(x: Any) -> None:
    carrier = polars.Series("s", np.ascontiguousarray(x))
    result = through_torch(carrier)
    assert (result.name, result.dtype) == ("s", carrier.dtype)
    same(result.to_numpy(), x)
