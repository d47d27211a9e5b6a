"""Conversions of random sparse arrays are bit-equal: layouts, dtypes, duplicates, orders and empty rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from arraybridge import CopyRequiredError, MemoryConversionError, convert_memory, explain, trace
from arraybridge.conversion import plan_cache
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


def _outcome(x: Any, target: str, options: dict[str, Any]) -> Any:
    """Return the contents and index dtypes of a converted array, or its error."""
    try:
        y = convert_memory(x, target, **options)
    except MemoryConversionError as error:
        return type(error), str(error)
    contents = read(y)
    return contents.bits(), [index.dtype.name for index in contents.indices], type(y), _flags(y)


def _flags(x: Any) -> tuple[Any, ...]:
    """Return what a sparse array states about the order of its indices, without reading them."""
    is_coalesced = str(getattr(x, "layout", "")) == "torch.sparse_coo" and x.is_coalesced()
    attributes = vars(x) if hasattr(x, "__dict__") else {}
    names = ("indices_sorted", "unique_indices", "has_canonical_format", "_has_canonical_format")
    return is_coalesced, *map(attributes.get, names)


def _vary(rng: np.random.Generator, x: Any) -> None:
    """Change what a SciPy array states about its indices, their dtypes, and its space for more entries."""
    choice = rng.integers(0, 6)
    if choice == 0 and x.format != "bsr":
        x.sum_duplicates()
    elif choice == 1 and x.format == "coo":
        x.coords = (x.coords[0].astype(np.int16), *x.coords[1:])
    elif choice == 1:
        x.indptr = x.indptr.astype(np.int64 if x.indptr.dtype == np.int32 else np.int32)
    elif choice == 2 and x.format in ("csr", "csc"):
        x.data = np.concatenate([x.data, x.data[:1]])
        x.indices = np.concatenate([x.indices, x.indices[:1]])
    elif choice == 3:
        x.data.flags.writeable = False
    elif choice == 4:
        x.data = x.data[::-1]


@pytest.mark.filterwarnings("ignore:.*[Cc]omplex")  # casts discard imaginary parts
@pytest.mark.parametrize("source", ["numpy", "torch", "jax", "tensorflow"])
def test_planned_conversions_equal_new_decisions(source: str) -> None:
    """Arrays of one class take turns: other dtypes, layouts, shapes, padding and unsupported layouts."""
    require(source)
    rng = np.random.default_rng(3)
    layouts = {"numpy": ("csr", "csc", "coo", "bsr"), "torch": ("csr", "csc", "coo", "bsr")}
    targets = [target for target in ("numpy", "torch", "jax", "tensorflow") if target != source]
    for target in targets:
        require(target)
    options = ({}, {}, {"copy": True}, {"copy": False}, {"dtype": "float32"}, {"device": "cpu"})
    for turn in range(150):
        layout = rng.choice(layouts.get(source, ("csr", "coo") if source == "jax" else ("coo",)))
        dtype = rng.choice(["float64", "float32", "int64", "int32", "uint8", "complex64", "bool"])
        index_dtype = rng.choice(["int32", "int64"])
        shape = (4, 6) if rng.random() < 0.7 else (2, 2)
        seed, count = int(rng.integers(0, 1000)), int(rng.integers(0, 9))
        options_of_contents = {"shape": shape, "count": count, "dtype": dtype, "index_dtype": index_dtype}
        contents = random_contents(layout, seed=seed, **options_of_contents)
        if source == "jax" and rng.random() < 0.2 and contents.indices[0].size:  # padding
            contents.indices[0].flat[-1] = 7
        x = made(source, contents)
        if source == "numpy":
            _vary(rng, x)
        target = rng.choice(targets)
        chosen = options[rng.integers(0, len(options))]
        kept = dict(plan_cache.plans_by_signature)
        plan_cache.plans_by_signature.clear()
        expected = _outcome(x, target, chosen)
        plan_cache.plans_by_signature.clear()
        plan_cache.plans_by_signature.update(kept)
        for _ in range(2):
            assert _outcome(x, target, chosen) == expected, (turn, layout, target, chosen)
