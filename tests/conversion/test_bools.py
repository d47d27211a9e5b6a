"""Bools whose bytes are neither 0 nor 1, which JAX and TensorFlow misread: they are copied, normalized."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import arraybridge as ab
from arraybridge import CopyRequiredError, convert_memory, explain, trace
from arraybridge.reasons import Reason
from tests import matrix_data as data
from tests.helpers import jax_with, require

TARGETS = ("jax", "tensorflow")


def aligned(count: int = 24) -> np.ndarray[Any, Any]:
    """Return uint8 values of which a third are 0, in memory that every framework can share."""
    memory: Any = ab.aligned(count, "uint8")
    memory[:] = np.resize([0, 1, 2, 255, 0, 128], count)
    return memory


class Producer:
    """An array of an unknown library."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


#: How to make an array of bools of uint8 values, which it shares.
SOURCES: dict[str, Callable[[Any], Any]] = {
    "view": lambda bits: bits.view(bool),
    "frombuffer": lambda bits: np.frombuffer(bits, bool),
    "torch": lambda bits: require("torch").from_numpy(bits).view(require("torch").bool),
    "DLPack": lambda bits: Producer(bits.view(bool)),
    "memoryview": lambda bits: memoryview(bits).cast("B").cast("?"),
    "xarray": lambda bits: pytest.importorskip("xarray").DataArray(bits.view(bool)),
}
LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "aligned": lambda bits: bits,
    "misaligned": lambda bits: bits[1:],
    "long": lambda bits: aligned(5000),
    "matrix": lambda bits: bits.reshape(4, 6),
    "transposed": lambda bits: bits.reshape(4, 6).T,
    "strided": lambda bits: bits[::2],
    "reversed": lambda bits: bits[::-1],
    "scalar": lambda bits: bits.reshape(4, 6)[1, 1],
    "empty": lambda bits: bits[:0],
}


def check(x: Any, target: str, expected: np.ndarray[Any, Any], **options: Any) -> Any:
    result = convert_memory(x, target, **options)
    assert data.dtype_name(result) == "bool"
    assert data.bits(result) == np.where(expected, 1, 0).astype(np.uint8).tobytes()
    return result


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("target", TARGETS)
def test_bools_are_normalized(target: str, source: str) -> None:
    require(target)
    make = SOURCES[source]
    for _ in range(3):  # the second and third calls use plans
        bits = aligned()
        before = bits.copy()
        x = make(bits)
        check(x, target, before != 0)
        check(x, target, before != 0, copy=True)
        assert np.array_equal(bits, before)
        route = explain(x, target)
        assert (route.copies, route.code) == (1, Reason.BOOL_BYTES)
        assert target in route.reason
        for call in (convert_memory, explain):
            with pytest.raises(CopyRequiredError, match="bytes other than 0 and 1"):
                call(x, target, copy=False)
        clean = aligned()
        clean[:] = clean != 0
        result = check(make(clean), target, before != 0)
        assert data.address(result) == data.address(clean)
        assert explain(make(clean), target, copy=False).shares_memory


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("target", TARGETS)
def test_bools_of_any_layout_are_normalized(target: str, layout: str) -> None:
    torch = require("torch")
    require(target)
    for _ in range(2):
        bits = np.asarray(LAYOUTS[layout](aligned()))
        check(bits.view(bool), target, bits != 0)
        if layout != "reversed":
            check(torch.from_numpy(bits).view(torch.bool), target, bits != 0)


@pytest.mark.parametrize("target", ["numpy", "torch"])
def test_numpy_and_torch_share_them(target: str) -> None:
    torch = require("torch")
    bits = aligned()
    for x in (bits.view(bool), torch.from_numpy(bits).view(torch.bool)):
        assert explain(x, target).copies == 0
        assert data.address(convert_memory(x, target)) == data.address(bits)


@pytest.mark.parametrize("target", TARGETS)
def test_casts_read_them_as_true(target: str) -> None:
    torch = require("torch")
    require(target)
    bits = aligned()
    for x in (bits.view(bool), torch.from_numpy(bits).view(torch.bool)):
        for dtype in ("float32", "int64"):
            result = np.asarray(convert_memory(x, target, dtype=dtype))
            assert result.tolist() == (bits != 0).astype(dtype).tolist()


def test_results_compute_as_in_numpy() -> None:
    jax = require("jax")
    bits = aligned()
    assert int(ab.to_jax(bits.view(bool)).sum()) == int(np.count_nonzero(bits))
    count = ab.jax(lambda mask: mask.sum())
    assert int(count(bits.view(bool))) == int(count({"a": bits.view(bool)}["a"])) == np.count_nonzero(bits)
    assert int(ab.convert_tree([bits.view(bool)], "jax")[0].sum()) == np.count_nonzero(bits)
    assert jax.numpy.array_equal(ab.to_jax(bits.view(bool)), ab.to_jax(bits != 0))


def test_other_devices_get_normalized_bools() -> None:
    jax_with(2)
    bits = aligned()
    check(bits.view(bool), "jax", bits != 0, device="cpu:1")


def test_images_of_one_bit() -> None:
    image = pytest.importorskip("PIL.Image")
    require("jax")
    pixels = np.array([[0, 255], [255, 255]], np.uint8)
    picture = image.fromarray(pixels).convert("1")
    for x in (picture, np.asarray(picture), np.array(picture)):
        assert int(ab.to_jax(x).sum()) == 3


@pytest.mark.parametrize("target", TARGETS)
def test_values_of_sparse_arrays_are_normalized(target: str) -> None:
    sparse = pytest.importorskip("scipy.sparse")
    require(target)
    x = sparse.coo_array((np.array([255, 1, 7], np.uint8).view(bool), ([0, 1, 2], [0, 1, 2])), shape=(3, 3))
    for _ in range(2):
        result = ab.convert_memory(x, target)
        values = result.data if target == "jax" else result.values
        assert data.bits(values) == b"\1\1\1"


def test_constants_of_differentiated_functions_are_normalized() -> None:
    torch = require("torch")
    require("jax")
    bits = aligned()
    masked_sum = ab.jax(grad="flow")(lambda x, mask: (x * mask).sum())
    x = torch.ones(24, requires_grad=True)
    masked_sum(x, bits.view(bool)).backward()
    assert x.grad is not None
    assert x.grad.tolist() == (bits != 0).astype(float).tolist()


def test_advice_names_an_expression_that_shares() -> None:
    require("jax")
    bits = aligned()
    x = bits.view(bool)
    with trace() as log:
        ab.to_jax(x)
    assert "x.view(np.uint8) != 0" in explain(x, "jax").advice
    assert log.records[0].code is Reason.BOOL_BYTES
