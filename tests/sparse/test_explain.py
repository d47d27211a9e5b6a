"""`explain` describes all parts of a sparse array in one route, which is the one that a trace records."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import convert_memory, explain, trace
from arraybridge.reasons import Reason
from tests.helpers import require
from tests.sparse.arrays import BETA, LAYOUTS, PAIRS, made, random_contents, read

pytestmark = pytest.mark.filterwarnings(BETA)


def test_one_route_describes_all_parts() -> None:
    require("torch")
    x = made("numpy", random_contents("csr"))
    route = explain(x, "torch")
    assert (route.source, route.target, route.layout) == ("numpy", "torch", "csr")
    assert (route.method, route.shares_memory, route.copies) == ("view", True, 0)
    assert route.code is Reason.SHARED_HOST_MEMORY
    assert route.nbytes == x.data.nbytes + x.indices.nbytes + x.indptr.nbytes
    assert route.advice == ""
    assert str(route).startswith("numpy → torch on cpu: sparse CSR, shared through a view")
    assert route.to_dict()["layout"] == "csr"
    assert "layout='csr'" in repr(route)
    assert "<td>CSR</td>" in route._repr_html_()


def test_routes_of_dense_arrays_have_no_layout() -> None:
    route = explain(np.ones(3), "numpy")
    assert route.layout == ""
    assert "layout" not in repr(route)
    assert "layout" not in route._repr_html_()


def test_copies_method_and_reason_are_those_of_the_part_that_is_copied_most() -> None:
    require("torch")
    require("tensorflow")
    x = made("numpy", random_contents("coo"))
    route = explain(x, "torch")
    assert (route.method, route.copies, route.shares_memory) == ("host", 1, False)
    assert route.code is Reason.SEPARATE_COORDINATES
    assert route.nbytes == x.data.nbytes + 2 * x.coords[0].nbytes
    narrow = made("numpy", random_contents("coo", index_dtype="int32"))
    assert explain(narrow, "torch").nbytes == narrow.data.nbytes + 2 * 8 * len(narrow.data)
    back = explain(convert_memory(x, "torch"), "numpy")
    assert (back.code, back.copies) == (Reason.SEPARATE_COORDINATES, 1)
    cast = explain(made("jax", random_contents("coo", index_dtype="int32")), "torch")
    assert (cast.code, cast.copies) == (Reason.INDEX_DTYPE, 1)
    assert "PyTorch" in cast.reason
    assert "int64" in cast.reason
    assert "cast them" in cast.advice
    values = explain(made("numpy", random_contents("csr")), "torch", dtype="float32")
    assert (values.code, values.copies, values.shares_memory) == (Reason.CAST_REQUESTED, 1, False)
    route = explain(made("numpy", random_contents("csr")), "torch", copy=True)
    assert (route.code, route.copies) == (Reason.COPY_REQUESTED, 1)


def test_advice_is_about_the_parts() -> None:
    require("jax")
    x = made("numpy", random_contents("csr"))
    x.data = np.ones(len(x.data) + 1)[1:].view()
    if x.data.ctypes.data % 64 == 0:  # pragma: no cover
        pytest.skip("the memory is aligned by chance")
    advice = explain(x, "jax").advice
    assert advice.startswith("for the copied values or indices: ")
    assert "aligned(shape, dtype)" in advice


@pytest.mark.parametrize("options", [{}, {"copy": True}, {"dtype": "float32"}, {"device": "cpu"}])
@pytest.mark.parametrize(("source", "target", "layout"), PAIRS)
def test_a_trace_records_the_route_of_explain(
    source: str, target: str, layout: str, options: dict[str, Any]
) -> None:
    require(target)
    x = made(source, random_contents(layout))
    expected = explain(x, target, **options)
    with trace() as log:
        y = convert_memory(x, target, **options)
    (record,) = log.records  # and none of the parts
    assert record == expected
    assert record.seconds is not None
    assert log.total_bytes_copied == expected.copies * expected.nbytes
    (event,) = log.events
    assert event.layout == ""
    assert f"sparse {layout.upper()}" in str(record)
    assert read(y).bits()[2] == read(convert_memory(x, target, **options)).bits()[2]


def test_traces_of_sparse_arrays_are_saved_and_shown(tmp_path: Any) -> None:
    require("torch")
    x = made("numpy", random_contents("coo"))
    with trace() as log:
        convert_memory(x, "torch")
    path = tmp_path / "run.json"
    log.save(path)
    assert json.loads(path.read_text())
    assert "one array per axis" in str(log)
    assert "one array per axis" in str(log.hotspots())


def test_native_calls_in_a_trace_are_unaffected_by_sparse_arrays() -> None:
    torch = require("torch")
    x = made("numpy", random_contents("csr"))
    with trace(foreign=True):
        assert np.asarray(x).shape == ()
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            torch.tensor(x)


@pytest.mark.parametrize("framework", LAYOUTS)
def test_explain_and_device_of_read_nothing(framework: str) -> None:
    for layout in LAYOUTS[framework]:
        x = made(framework, random_contents(layout))
        route = explain(x, framework)
        assert (route.method, route.copies, route.code) == ("same", 0, Reason.SAME_OBJECT)
        contents = read(x)
        indices = contents.indices
        if framework == "numpy" and layout == "coo":
            indices = x.coords
        assert route.nbytes == contents.values.nbytes + sum(index.nbytes for index in indices)
        assert str(arraybridge.device_of(x)) == "cpu"
        assert arraybridge.detect_memory_type(x) == framework


def test_explain_of_millions_of_coordinates_allocates_nothing_of_their_size() -> None:
    import tracemalloc

    require("torch")
    x = made("numpy", random_contents("coo", shape=(1000, 1000), count=1_000_000))
    explain(x, "torch")
    tracemalloc.start()
    try:
        route = explain(x, "torch")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert route.nbytes == 24_000_000
    assert most < 1_000_000
