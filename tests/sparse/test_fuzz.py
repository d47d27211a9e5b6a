"""Conversions of random sparse arrays are bit-equal: layouts, dtypes, duplicates, orders and empty rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from arraybridge import CopyRequiredError, convert_memory, explain, trace
from tests.helpers import require
from tests.sparse.arrays import (
    BETA,
    HAS_MORE_AXES,
    PAIRS,
    Contents,
    made,
    random_contents,
    random_values,
    read,
)

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

pytestmark = pytest.mark.filterwarnings(BETA)

#: Dtypes that all four frameworks have, and two of NumPy's extensions.
DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "complex64", "complex128", "bool"),
    *("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
)


@st.composite
def contents(draw: st.DrawFn, layout: str) -> Contents:
    extents = [0, 2, 4, 10] if layout == "bsr" else [0, 1, 2, 3, 7, 20]
    shape = draw(st.sampled_from(extents)), draw(st.sampled_from(extents))
    options: dict[str, Any] = {
        "shape": shape,
        "count": draw(st.sampled_from([0, 1, 2, 5, 30])) if 0 not in shape else 0,
        "dtype": draw(st.sampled_from(DTYPES)),
        "index_dtype": draw(st.sampled_from(["int32", "int64"])),
        "seed": draw(st.integers(0, 1000)),
    }
    if layout == "coo" and draw(st.booleans()):
        return _with_more_axes(draw, options)
    return random_contents(layout, **options)


def _with_more_axes(draw: st.DrawFn, options: dict[str, Any]) -> Contents:
    """Return COO arrays with one, three or four axes."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4 if HAS_MORE_AXES else 2)))
    random = np.random.default_rng(options["seed"])
    indices = np.stack([random.integers(0, extent, options["count"]) for extent in shape], axis=1)
    values = random_values(random, (options["count"],), options["dtype"])
    return Contents("coo", shape, values, (indices.astype(options["index_dtype"]),))


@pytest.mark.parametrize(("source", "target", "layout"), PAIRS)
@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.data())
def test_every_pair_is_bit_equal(source: str, target: str, layout: str, data: st.DataObject) -> None:
    for name in {source, target} - {"numpy"}:
        require(name)
    require("ml_dtypes")
    copy = data.draw(st.sampled_from([None, True, False]))
    x = made(source, data.draw(contents(layout)))
    before = read(x).bits()
    try:
        route = explain(x, target, copy=copy)
    except CopyRequiredError:
        with pytest.raises(CopyRequiredError):
            convert_memory(x, target, copy=copy)
        return
    y = convert_memory(x, target, copy=copy)
    assert read(y).bits() == before == read(x).bits()
    assert (y is x) == (route.method == "same")
    assert read(convert_memory(x, target, copy=copy)).bits() == before  # by the plan
    with trace() as log:
        convert_memory(x, target, copy=copy)
    assert log.records == [route]
    back = convert_memory(y, source)
    assert read(back).bits() == before
