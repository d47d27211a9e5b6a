"""Arrays with units, whose conversion raises, because the unit would be lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import arraybridge as ab
from tests.helpers import require

VALUES = np.arange(3.0)


def package(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name.partition('.')[0]} is not installed")


def pint(values: Any, unit: str = "m") -> Any:
    return package("pint").UnitRegistry().Quantity(values, unit)


def over_xarray(values: Any) -> Any:
    return package("xarray").DataArray(values, dims="x")


def masked_column() -> Any:
    return package("astropy.table").MaskedColumn(VALUES, mask=[False, True, False], unit="m")


MASKED = [0.0, 0.0, 2.0]
#: An array with a unit → how to make it, and its values.
ARRAYS: dict[str, tuple[Callable[[], Any], list[float]]] = {
    "astropy": (lambda: VALUES * package("astropy.units").m, [0, 1, 2]),
    "astropy without dimension": (
        lambda: VALUES * package("astropy.units").dimensionless_unscaled,
        [0, 1, 2],
    ),
    "astropy angle": (lambda: package("astropy.coordinates").Angle(VALUES, "deg"), [0, 1, 2]),
    "astropy decibel": (lambda: package("astropy.units").Decibel([0.0, 10.0]), [0, 10]),
    "astropy column": (lambda: package("astropy.table").Column(VALUES, unit="m"), [0, 1, 2]),
    "astropy masked column": (masked_column, MASKED),
    "astropy masked": (
        lambda: package("astropy.utils.masked").Masked(VALUES * package("astropy.units").m, VALUES == 1),
        MASKED,
    ),
    "unyt": (lambda: package("unyt").unyt_array(VALUES, "m"), [0, 1, 2]),
    "unyt without dimension": (lambda: package("unyt").unyt_array(VALUES, ""), [0, 1, 2]),
    "quantities": (lambda: package("quantities").Quantity(VALUES, "m"), [0, 1, 2]),
    "pint": (lambda: pint(VALUES), [0, 1, 2]),
    "pint without dimension": (lambda: pint(VALUES, ""), [0, 1, 2]),
    "pint over a tensor": (lambda: pint(require("torch").arange(3.0)), [0, 1, 2]),
    "pint over a masked array": (lambda: pint(np.ma.masked_equal(VALUES, 1)), MASKED),
    "xarray over astropy": (lambda: over_xarray(VALUES * package("astropy.units").m), [0, 1, 2]),
    "xarray over pint": (lambda: over_xarray(pint(VALUES)), [0, 1, 2]),
    "xarray over unyt": (lambda: over_xarray(package("unyt").unyt_array(VALUES, "m")), [0, 1, 2]),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_units_are_not_dropped(name: str) -> None:
    torch = require("torch")
    make, values = ARRAYS[name]
    x = make()
    for call in (
        ab.to_torch,
        lambda x: ab.explain(x, "torch"),
        lambda x: ab.convert_tree([{"a": x}], "torch"),
    ):
        with pytest.raises(ab.ArrayNotSupportedError, match="lost") as caught:
            call(x)
        assert caught.value.expressions
    plain = eval(caught.value.expressions[0].replace("x[0]['a']", "x"), {"x": x, "np": np})  # noqa: S307
    converted = ab.to_torch(plain)
    assert (type(converted), converted.tolist()) == (torch.Tensor, values)
    with pytest.raises(ab.ArrayNotSupportedError, match="'x'"):
        ab.torch(lambda x: x)(x)


def test_arrays_of_numpy_keep_their_unit_in_numpy() -> None:
    x = VALUES * package("astropy.units").m
    assert ab.to_numpy(x) is x
    assert ab.to_numpy(x, copy=True).unit == x.unit
    assert ab.numpy(lambda y: y * y)(x).unit == x.unit**2


def test_subclasses_without_a_unit_are_converted() -> None:
    require("torch")
    assert ab.to_torch(package("astropy.table").Column(VALUES)).tolist() == [0, 1, 2]
    fields = np.zeros(2, [("unit", "f4"), ("units", "f4"), ("mask", "f4")]).view(np.recarray)
    assert ab.to_torch(fields["unit"]).tolist() == [0, 0]
    with pytest.raises(ab.DtypeNotSupportedError, match="fields"):
        ab.to_torch(fields)


def test_results_with_a_unit_raise() -> None:
    units = package("astropy.units")
    in_meters = ab.numpy(output_type="torch")(lambda x: x * units.m)
    with pytest.raises(ab.ArrayNotSupportedError, match=r"result\.view"):
        in_meters(VALUES)


def test_numbers_of_pint_are_not_arrays() -> None:
    number = pint(3.0)
    assert ab.numpy(lambda x, length: length)(VALUES, number) is number
    assert ab.convert_tree({"length": number}, "torch")["length"] is number
