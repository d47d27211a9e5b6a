"""DtypeConversion: the rule, at its edges, in every framework."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import ArrayNotSupportedError, DtypeConversion, DtypeNotSupportedError, convert_memory
from arraybridge.functions.dtypes import convert_dtype
from tests.functions.cases import FRAMEWORKS, HOST, framework_of
from tests.helpers import require

INTEGERS = ["uint8", "uint16", "uint32", "int8", "int16", "int32", "uint64", "int64"]


def converted(x: np.ndarray[Any, Any], target: str, dtype: str) -> np.ndarray[Any, Any]:
    """Convert the dtype in a framework; back in NumPy."""
    result = convert_dtype(convert_memory(x, target), dtype)
    assert framework_of(result) == target
    back = convert_memory(result, "numpy")
    assert back.dtype == np.dtype(dtype)
    return back


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("source", ["float32", "float64", "float16"])
@pytest.mark.parametrize("target", HOST)
def test_floating_numbers_fill_the_range_of_the_dtype(target: str, source: str, dtype: str) -> None:
    require(target)
    info = np.iinfo(dtype)
    result = converted(np.array([[-1.0, 0.0], [3.0, 1.0]], source), target, dtype)
    assert result[0, 0] == info.min
    assert result[1, 0] == info.max, "the top of the range is no float32, for 64 bits no float64 either"
    quarter = (int(info.max) - int(info.min)) / 4 + int(info.min)
    assert abs(int(result[0, 1]) - quarter) <= max(0.5, 2.0**-52 * abs(quarter))


@pytest.mark.parametrize("target", HOST)
def test_scaling_follows_the_documented_formula(target: str) -> None:
    require(target)
    x = np.random.default_rng(7).normal(size=(5, 7))
    expected = np.round((x - x.min()) / (x.max() - x.min()) * 65535).astype(np.uint16)
    assert converted(x, target, "uint16").tolist() == expected.tolist()


@pytest.mark.parametrize("target", FRAMEWORKS)
def test_a_constant_image_becomes_the_lowest_value(target: str) -> None:
    require(target)
    x = np.full((2, 2), 3.5, np.float32)
    assert converted(x, target, "uint8").tolist() == [[0, 0], [0, 0]]
    assert converted(x, target, "int16").tolist() == [[-32768, -32768], [-32768, -32768]]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("target", FRAMEWORKS)
def test_nan_and_infinity_are_refused(target: str, bad: float) -> None:
    require(target)
    x = convert_memory(np.array([0.0, bad, 1.0], np.float32), target)
    with pytest.raises(ArrayNotSupportedError, match="NaN or infinity"):
        convert_dtype(x, "uint8")


@pytest.mark.parametrize("target", HOST)
def test_integers_to_integers_keep_their_numbers_or_are_refused(target: str) -> None:
    require(target)
    x = np.array([0, 100, 255], np.int64)
    assert converted(x, target, "uint8").tolist() == [0, 100, 255]
    assert converted(x.astype(np.uint8), target, "int32").tolist() == [0, 100, 255]
    for source, dtype, value in (
        ("int64", "uint8", 256),
        ("int64", "uint8", -1),
        ("uint16", "int8", 128),
        ("uint32", "int32", 2**31),
        ("uint64", "int64", 2**63),
        ("int32", "uint32", -1),
    ):
        array = convert_memory(np.array([0, value], source), target)
        with pytest.raises(ArrayNotSupportedError, match=str(value)):
            convert_dtype(array, dtype)


@pytest.mark.parametrize("target", HOST)
def test_bool_counts_as_zero_and_one(target: str) -> None:
    require(target)
    mask = np.array([True, False])
    assert converted(mask, target, "uint8").tolist() == [1, 0]
    assert converted(np.array([0, 1], np.int32), target, "bool").tolist() == [False, True]
    with pytest.raises(ArrayNotSupportedError, match="2"):
        convert_dtype(convert_memory(np.array([0, 2]), target), "bool")
    with pytest.raises(DtypeNotSupportedError):
        convert_dtype(convert_memory(np.array([0.5]), target), "bool")


@pytest.mark.parametrize("target", HOST)
def test_floating_targets_keep_the_numbers(target: str) -> None:
    require(target)
    assert converted(np.array([1, 200], np.uint8), target, "float32").tolist() == [1.0, 200.0]
    assert converted(np.array([0.1, np.nan, np.inf]), target, "float32").tolist()[0] == np.float32(0.1)
    with pytest.raises(ArrayNotSupportedError, match="range of float32"):
        convert_dtype(convert_memory(np.array([1e300]), target), "float32")
    with pytest.raises(ArrayNotSupportedError, match="range of float16"):
        convert_dtype(convert_memory(np.array([70000]), target), "float16")


@pytest.mark.parametrize("target", HOST)
def test_complex_is_refused(target: str) -> None:
    require(target)
    with pytest.raises(DtypeNotSupportedError, match="complex"):
        convert_dtype(convert_memory(np.array([1j]), target), "uint8")


@pytest.mark.parametrize("target", HOST)
def test_the_edges(target: str) -> None:
    require(target)
    for shape in ((0, 3), ()):
        for dtype in ("uint8", "float32", "int64"):
            assert converted(np.zeros(shape), target, dtype).shape == shape
    assert converted(np.array([-1.7e308, 0.0, 1.7e308]), target, "uint8").tolist() == [0, 128, 255]
    small = np.array([[0.0, 0.5, 1.0]]).astype("float16")
    assert converted(small, target, "int8").tolist() == [[-128, 0, 127]]


def test_pyclesperanto_follows_the_rule_for_the_dtypes_that_it_has() -> None:
    require("pyclesperanto")
    for dtype in ("uint8", "int16", "uint32"):
        info = np.iinfo(dtype)
        result = converted(np.array([[0.0, 1.0]], np.float32), "pyclesperanto", dtype)
        assert result.tolist() == [[info.min, info.max]]
    with pytest.raises(ArrayNotSupportedError, match="16777217"):
        convert_dtype(convert_memory(np.array([[0, 2**24 + 1]], np.int32), "pyclesperanto"), "uint16")
    with pytest.raises(DtypeNotSupportedError, match="float64"):
        convert_dtype(convert_memory(np.ones((1, 2), np.int32), "pyclesperanto"), "float64")


def test_the_members_of_dtype_conversion() -> None:
    preserve = arraybridge.numpy(dtype_conversion=DtypeConversion.PRESERVE_INPUT)
    sums = preserve(lambda x, *rest: x.astype(np.int64) + 1)
    assert sums(np.array([1, 2], np.uint16), np.ones(2)).dtype == np.uint16
    with pytest.raises(ArrayNotSupportedError, match=r"result.*65536"):
        sums(np.array([65535], np.uint16))
    assert preserve(lambda n: np.ones(n))(3).dtype == np.float64
    native = arraybridge.numpy(dtype_conversion=DtypeConversion.NATIVE_OUTPUT)
    assert native(lambda x: x / 2)(np.ones(2, np.uint8)).dtype == np.float64
    assert DtypeConversion.UINT8.numpy_dtype is np.uint8
    assert DtypeConversion.PRESERVE_INPUT.numpy_dtype is DtypeConversion.NATIVE_OUTPUT.numpy_dtype is None
