"""`DtypeConversion`: the conversion rule and its edge cases in every framework."""

from __future__ import annotations

import typing
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import ArrayNotSupportedError, DtypeConversion, DtypeNotSupportedError, convert_memory
from arraybridge.decorators.dtype_conversion import DtypeConversionName, convert_dtype
from tests.decorators.cases import FRAMEWORKS, HOST, framework_of
from tests.helpers import require

INTEGERS = ["uint8", "uint16", "uint32", "int8", "int16", "int32", "uint64", "int64"]


def converted(x: np.ndarray[Any, Any], target: str, dtype: str) -> np.ndarray[Any, Any]:
    """Convert the dtype in a framework, and return a NumPy array."""
    result = convert_dtype(convert_memory(x, target), dtype)
    assert framework_of(result) == target
    back = convert_memory(result, "numpy")
    assert back.dtype == np.dtype(dtype)
    return back


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("source", ["float32", "float64", "float16"])
@pytest.mark.parametrize("target", HOST)
def test_floats_are_scaled_to_the_range_of_the_dtype(target: str, source: str, dtype: str) -> None:
    require(target)
    info = np.iinfo(dtype)
    result = converted(np.array([[-1.0, 0.0], [3.0, 1.0]], source), target, dtype)
    assert result[0, 0] == info.min
    assert result[1, 0] == info.max, "the maximum must be exact, although no float may represent it"
    quarter = (int(info.max) - int(info.min)) / 4 + int(info.min)
    assert abs(int(result[0, 1]) - quarter) <= max(0.5, 2.0**-52 * abs(quarter))


#: Dtype, values and requested dtype; and the resulting values, or the reason why there are none.
RULE: list[tuple[str, list[Any], str, Any]] = [
    ("float64", [2, 2.2, 2.25, 3], "uint16", [0, 13107, 16384, 65535]),
    ("float32", [3.5, 3.5], "uint8", [0, 0]),
    ("float32", [3.5, 3.5], "int16", [-32768, -32768]),
    ("float32", [0, 1], "uint32", [0, 2**32 - 1]),
    ("float32", [0, np.nan, 1], "uint8", "NaN or infinity"),
    ("float32", [0, np.inf, 1], "uint8", "NaN or infinity"),
    ("float32", [0, -np.inf, 1], "uint8", "NaN or infinity"),
    ("float16", [0, 0.5, 1], "int8", [-128, 0, 127]),
    ("float64", [-1.7e308, 0, 1.7e308], "uint8", "too far apart"),
    ("int64", [0, 100, 255], "uint8", [0, 100, 255]),
    ("uint8", [0, 100, 255], "int32", [0, 100, 255]),
    ("int64", [0, 256], "uint8", "256"),
    ("int64", [0, -1], "uint8", "-1"),
    ("uint16", [0, 128], "int8", "128"),
    ("uint32", [0, 2**31], "int32", "2147483648"),
    ("uint64", [0, 2**63], "int64", "9223372036854775808"),
    ("uint64", [0, 2**63 - 1], "int64", [0, 2**63 - 1]),
    ("int32", [0, -1], "uint32", "-1"),
    ("int32", [0, 2**24 + 1], "uint16", "16777217"),
    ("bool", [True, False], "uint8", [1, 0]),
    ("int32", [0, 1], "bool", [False, True]),
    ("int64", [0, 2], "bool", "2"),
    ("float64", [0.5], "bool", "no rule"),
    ("uint8", [1, 200], "float32", [1, 200]),
    ("float64", [0.1, np.nan, np.inf], "float32", [np.float32(0.1), np.nan, np.inf]),
    ("int32", [1, 1], "float64", [1, 1]),
    ("complex128", [1j], "uint8", "complex"),
]


@pytest.mark.parametrize(("source", "numbers", "dtype", "outcome"), RULE)
@pytest.mark.parametrize("target", FRAMEWORKS)
def test_conversion_rule(target: str, source: str, numbers: list[Any], dtype: str, outcome: Any) -> None:
    require(target)
    has = arraybridge.framework(target).dtypes
    if has is not None and source not in has:
        pytest.skip(f"{target} has no {source}")
    if has is not None and dtype not in has:
        outcome = f"no dtype {dtype}|{dtype}"
    if isinstance(outcome, str):
        with pytest.raises((ArrayNotSupportedError, DtypeNotSupportedError), match=outcome):
            convert_dtype(convert_memory(np.array([numbers], source), target), dtype)
    else:
        np.testing.assert_array_equal(converted(np.array([numbers], source), target, dtype), [outcome])


@pytest.mark.parametrize("dtype", ["uint8", "float32", "int64"])
@pytest.mark.parametrize("target", HOST)
def test_arrays_without_elements_or_axes(target: str, dtype: str) -> None:
    require(target)
    for shape in ((0, 3), ()):
        assert converted(np.zeros(shape), target, dtype).shape == shape


def test_members_of_dtype_conversion() -> None:
    preserve = arraybridge.numpy(dtype_conversion=DtypeConversion.PRESERVE_INPUT)
    sums = preserve(lambda x, *rest: x.astype(np.int64) + 1)
    assert sums(np.array([1, 2], np.uint16), np.ones(2)).dtype == np.uint16
    with pytest.raises(ArrayNotSupportedError, match=r"result.*65536"):
        sums(np.array([65535], np.uint16))
    assert preserve(lambda n: np.ones(n))(3).dtype == np.float64
    native = arraybridge.numpy(dtype_conversion=DtypeConversion.NATIVE_OUTPUT)
    assert native(lambda x: x / 2)(np.ones(2, np.uint8)).dtype == np.float64
    assert DtypeConversion.UINT8.dtype == "uint8"
    assert DtypeConversion.PRESERVE_INPUT.dtype is DtypeConversion.NATIVE_OUTPUT.dtype is None


@pytest.mark.parametrize("member", DtypeConversion)
def test_names_of_conversions_are_accepted(member: DtypeConversion) -> None:
    names = typing.get_args(DtypeConversionName)
    assert [one.name.lower() for one in DtypeConversion] == list(names)
    decorated: Any = arraybridge.numpy(dtype_conversion=member.name.lower())  # type: ignore[call-overload]
    by_member = arraybridge.numpy(dtype_conversion=member)
    values = np.array([0.0, 1.0])
    results = [f(lambda x: x)(values) for f in (decorated, by_member)]
    assert results[0].dtype == results[1].dtype
    np.testing.assert_array_equal(*results)
    for spelling in (member.name, member.name.lower()):
        assert DtypeConversion(spelling) is member


def test_misspelled_conversion_raises_with_a_suggestion() -> None:
    with pytest.raises(ValueError, match="did you mean 'uint8'"):
        arraybridge.numpy(dtype_conversion="unit8")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="expects a DtypeConversion or its name, got int"):
        arraybridge.numpy(dtype_conversion=3)  # type: ignore[call-overload]
    names = ", ".join(map(repr, typing.get_args(DtypeConversionName)))
    message = rf"'unit8' is not a DtypeConversion \(did you mean 'uint8'\?\)\. Pass one of {names}\.$"
    with pytest.raises(ValueError, match="^" + message):
        DtypeConversion("unit8")
    with pytest.raises(
        ValueError, match=r"^dtype\('uint8'\) is not a DtypeConversion\. Pass one of .* 'float64'\.$"
    ):
        DtypeConversion(np.dtype("uint8"))
    with pytest.raises(ValueError, match="^dtype_conversion=" + message):
        arraybridge.numpy(dtype_conversion="unit8")  # type: ignore[call-overload]
