"""Sparse matrices of CuPy on two GPUs. CSR and CSC need cuSPARSE, which the emulated GPU does not have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import Pipeline, convert_memory, device_map, explain, prefetch, trace
from tests.gpu.test_ordering import (
    _two_gpus,  # noqa: F401  # used by needs_two_gpus
    needs_two_gpus,
)
from tests.helpers import needs_kernels_of, output_of, require

pytestmark = pytest.mark.gpu
scipy_sparse = pytest.importorskip("scipy.sparse", reason="SciPy is not installed")

VALUES = [3.0, 0.0, 5.0, -0.0]
#: With a duplicate, and in no order.
ROWS, COLUMNS = [1, 0, 1, 0], [2, 1, 2, 0]


def matrix(layout: str, index_dtype: str) -> Any:
    """Return a SciPy array of 2 × 3 whose parts were written by hand."""
    x = getattr(scipy_sparse, f"{layout}_array")((2, 3))
    x.data = np.array(VALUES)
    if layout == "coo":
        x.coords = (np.array(ROWS, index_dtype), np.array(COLUMNS, index_dtype))
        x.has_canonical_format = False
    else:
        x.indices = np.array([1, 0, 1, 1], index_dtype)
        x.indptr = np.array([0, 2, 4] if layout == "csr" else [0, 2, 3, 4], index_dtype)
    return x


def parts(x: Any, layout: str) -> list[Any]:
    """Return values and indices of a matrix of SciPy or CuPy."""
    if layout != "coo":
        return [x.data, x.indices, x.indptr]
    return [x.data, *(x.coords if hasattr(x, "coords") else (x.row, x.col))]


def on_host(x: Any, layout: str) -> list[tuple[str, list[Any], bytes]]:
    """Return dtype, values and bytes of each part, copied by CuPy itself."""
    arrays = [part.get() if hasattr(part, "get") else part for part in parts(x, layout)]
    return [(array.dtype.name, array.tolist(), array.tobytes()) for array in arrays]


@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
def test_scipy_to_the_gpu_and_back(layout: str, index_dtype: str) -> None:
    cupy = require("cupy")
    if layout != "coo":
        needs_kernels_of("cuSPARSE")
    x = matrix(layout, index_dtype)
    route = explain(x, "cupy")
    assert (route.layout, route.copies, route.shares_memory, str(route.device)) == (layout, 1, False, "gpu:0")
    for _ in range(2):  # also by the plan of the first call
        with trace() as log:
            y = convert_memory(x, "cupy")
        assert log.records == [route]
        assert type(y).__name__ == f"{layout}_matrix"
        assert type(y).__module__.startswith("cupyx.scipy.sparse")
        assert y.shape == (2, 3)
        assert on_host(y, layout) == on_host(x, layout)
    assert arraybridge.detect_memory_type(y) == "cupy"
    assert convert_memory(y, "cupy") is arraybridge.to_gpu(y) is y
    back = convert_memory(y, "numpy")
    assert type(back) is type(x)
    assert on_host(back, layout) == on_host(x, layout)
    copied = convert_memory(y, "cupy", copy=True)
    for part in parts(copied, layout):
        part[...] = 7
    assert on_host(y, layout) == on_host(x, layout)
    cast = convert_memory(y, "cupy", dtype="float32")
    assert cast.data.dtype == cupy.float32
    assert cast.data.get().tolist() == VALUES


@needs_two_gpus
def test_matrices_move_between_gpus() -> None:
    cupy = require("cupy")
    x = matrix("coo", "int32")
    second = convert_memory(x, "cupy", 1)
    moved = convert_memory(second, "cupy", 0)
    for y, gpu in ((second, 1), (moved, 0)):
        assert str(arraybridge.device_of(y)) == f"gpu:{gpu}"
        assert {part.device.id for part in parts(y, "coo")} == {gpu}
        assert on_host(y, "coo") == on_host(x, "coo")
        assert on_host(convert_memory(y, "numpy"), "coo") == on_host(x, "coo")
    assert cupy.cuda.runtime.getDevice() == 0


@needs_two_gpus
def test_a_matrix_for_the_second_gpu_does_not_open_the_first() -> None:
    lines = (
        "import numpy as np, scipy.sparse, arraybridge as ab",
        "from arraybridge import cuda_driver",
        "x = scipy.sparse.coo_array(([1.0, 2.0], ([0, 1], [1, 0])))",
        "y = ab.convert_memory(x, 'cupy', 1)",
        "z = ab.convert_memory(y, 'cupy', copy=True)",
        "print(ab.to_numpy(z).toarray().tolist(), [cuda_driver.has_context(i) for i in range(2)])",
    )
    assert output_of(*lines) == "[[0.0, 1.0], [2.0, 0.0]] [False, True]"


def test_duplicates_are_not_claimed_to_be_canonical() -> None:
    require("cupy")
    y = convert_memory(matrix("coo", "int32"), "cupy")
    assert not y.has_canonical_format
    assert not convert_memory(y, "numpy").has_canonical_format


def test_decorated_functions_receive_and_restore_matrices() -> None:
    require("cupy")
    seen: list[str] = []

    @arraybridge.cupy(output_type="input")
    def negated(x: Any) -> Any:
        seen.append(type(x).__name__)
        x.data = -x.data
        return x

    for kind in ("array", "matrix"):
        x = getattr(scipy_sparse, f"coo_{kind}")(matrix("coo", "int32"))
        y = negated(x)
        assert type(y) is type(x)
        assert y.data.tolist() == [-3.0, 0.0, -5.0, 0.0]
        assert x.data.tolist() == VALUES
    assert seen == ["coo_matrix"] * 2


def test_matrices_pass_through_prefetch_device_map_and_pipelines() -> None:
    cupy = require("cupy")
    x = matrix("coo", "int32")

    @arraybridge.cupy
    def doubled(y: Any) -> Any:
        y.data = y.data * 2
        return y

    items = list(prefetch([{"x": x}, {"x": x}], "cupy"))
    assert [on_host(item["x"], "coo") for item in items] == [on_host(x, "coo")] * 2
    results = list(device_map(doubled, [x, x], devices=["gpu:0"]))
    results += Pipeline(doubled, arraybridge.cupy(same)).map([x])
    for result in results:
        assert type(result).__name__ == "coo_matrix"
        assert isinstance(result.data, cupy.ndarray)
        assert result.data.get().tolist() == [6.0, 0.0, 10.0, -0.0]
        assert [result.row.get().tolist(), result.col.get().tolist()] == [ROWS, COLUMNS]


def same(x: Any) -> Any:
    return x
