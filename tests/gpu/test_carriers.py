"""Carriers of arrays on a GPU: xarray over CuPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import arraybridge as ab
from tests.helpers import require

pytestmark = pytest.mark.gpu
xarray = pytest.importorskip("xarray")


def test_xarray_over_cupy_stays_on_the_gpu() -> None:
    cupy = require("cupy")
    values = np.arange(24.0, dtype=np.float32).reshape(2, 3, 4)
    coords = {"z": [0.5, 1.5]}
    x = xarray.DataArray(cupy.asarray(values), dims=("z", "y", "x"), coords=coords, attrs={"unit": "mm"})
    assert ab.detect_memory_type(x) == "cupy"
    assert str(ab.device_of(x)) == "gpu:0"
    assert ab.convert_memory(x, "cupy") is x.data
    assert ab.explain(x, "numpy").method == "host"
    host = ab.to_numpy(x)
    assert (host.dtype, host.tobytes()) == (values.dtype, values.tobytes())

    @ab.cupy(output_type="input")
    def shifted(y: Any) -> Any:
        assert y.data.ptr == x.data.data.ptr
        return cupy.flip(y, 0)

    result = shifted(x)
    assert isinstance(result.data, cupy.ndarray)
    assert (result.dims, result.attrs) == (x.dims, x.attrs)
    assert result.coords.equals(x.coords)
    assert cupy.asnumpy(result.data).tobytes() == values[::-1].tobytes()

    @ab.numpy(output_type="input")
    def on_the_host(y: Any) -> Any:
        assert type(y) is np.ndarray
        return y.copy()

    back = on_the_host(x)
    assert isinstance(back, xarray.DataArray)
    assert isinstance(back.data, cupy.ndarray), "the result must be on the original device"
    assert back.identical(x.copy(data=cupy.asarray(values)))
