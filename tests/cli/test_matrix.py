"""Test `arraybridge matrix`: the conversions, the JSON document, the HTML page and the heat map."""

from __future__ import annotations

import importlib.util
import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arraybridge.cli import matrix as command
from arraybridge.cli import matrix_report, output
from tests.cli.programs import call_cli
from tests.helpers import require

Json = dict[str, Any]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Json, Path]:
    """Run the command once with all output files, for NumPy, PyTorch and JAX and a dtype that all support."""
    require("torch")
    require("jax")
    folder = tmp_path_factory.mktemp("matrix")
    arguments = ["--frameworks", "numpy,torch,jax", "--size", "256KiB", "--dtype", "int64", "--json"]
    arguments += ["--html", str(folder / "page.html")]
    if importlib.util.find_spec("matplotlib") is not None:
        arguments += ["--png", str(folder / "map.png")]
    done = call_cli("matrix", *arguments)
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout), folder


def test_every_pair_is_converted_exactly(measured: tuple[Json, Path]) -> None:
    result, _ = measured
    names = ["numpy", "torch", "jax"]
    assert result["places"] == names
    assert [(c["source"], c["target"]) for c in result["cells"]] == [(a, b) for a in names for b in names]
    assert (result["nbytes"], result["shape"], result["dtype"]) == (262144, [32, 1024], "int64")
    for cell in result["cells"]:
        assert cell["exact"] is True
        assert cell["kind"] == ("same" if cell["source"] == cell["target"] else "shared")
        assert (cell["shares_memory"], cell["copies"]) == (True, 0)
        assert 0 < cell["seconds"] < 1
        assert cell["bytes_per_second"] is None
        assert cell["error"] is None
    # JAX cannot share memory that is aligned to 16 bytes only.
    assert [(c["source"], c["target"], c["kind"]) for c in result["numpy_own"]] == [
        ("numpy unaligned", "numpy", "same"),
        ("numpy unaligned", "torch", "shared"),
        ("numpy unaligned", "jax", "copied"),
    ]
    assert all(cell["exact"] for cell in result["numpy_own"])


def test_the_html_page_is_complete_and_uses_no_network(measured: tuple[Json, Path]) -> None:
    text = (measured[1] / "page.html").read_text(encoding="utf-8")
    assert not re.search(r"https?://|//[a-z]+\.[a-z]+/|@import|src=", text)
    assert "numpy unaligned: large arrays as NumPy allocates them" in unescape(text)
    # 12 pairs in 7 columns, the first of which contains headings, and a grid of 12.
    assert len(re.findall("<td[ >]", text)) == text.count("</td>") == 12 * 6 + 12


def test_the_html_page_escapes_texts_of_frameworks() -> None:
    cell = {"source": "numpy", "target": "<script>", "kind": "refused", "error": '<b onload="x()">&'}
    names = ("method", "device", "shares_memory", "copies", "seconds", "bytes_per_second", "exact", "reason")
    result = {"dtype": "float32", "shape": [1], "nbytes": 4, "arraybridge": "1", "machine": "<i>"}
    result |= {"places": ["<u>"], "cells": [dict.fromkeys(names) | cell], "missing": {"<s>": "<em>"}}
    text = matrix_report.html_page(result | {"numpy_own": []})
    for tag in ("<b ", "<i>", "<u>", "<s>", "<em>"):
        assert tag not in text
    assert "<script>" not in text


def test_the_heat_map_is_an_image_with_many_colors(measured: tuple[Json, Path]) -> None:
    image = pytest.importorskip("matplotlib.image")
    pixels = image.imread(measured[1] / "map.png")
    assert min(pixels.shape[:2]) > 400
    assert len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 50


def test_cells_of_the_heat_map_name_kind_method_and_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    axes = pytest.importorskip("matplotlib.axes").Axes
    written: list[str] = []
    write = axes.text

    def text(self: Any, x: float, y: float, words: str, **options: Any) -> Any:
        written.append(words)
        return write(self, x, y, words, **options)

    monkeypatch.setattr(axes, "text", text)
    kinds = [
        ("same", "same", 1e-6),
        ("shared", "view", 2e-6),
        ("refused", None, None),
        ("same", "same", 1e-6),
    ]
    cells = [{"kind": kind, "method": method, "seconds": seconds} for kind, method, seconds in kinds]
    result = {"places": ["a", "b"], "cells": cells, "dtype": "int8", "nbytes": 1}
    matrix_report.plot_times(result, tmp_path / "map.png")
    assert written == ["same\n1.0 µs", "shared\nview\n2.0 µs", "refused", "same\n1.0 µs"]


def test_cells_of_frameworks_without_the_dtype_are_refused() -> None:
    require("pyclesperanto")
    places = command.list_places(["numpy", "pyclesperanto"])
    assert [framework for framework, _ in places.values()] == ["numpy", "pyclesperanto"]
    with output.progress_bar() as bar:
        refused, _ = command.measure(places, np.zeros((2, 3)), bar)
        copied, own = command.measure(places, np.ones((2, 3), np.uint8), bar)
    assert [cell["kind"] for cell in refused] == ["same", "refused", "refused", "refused"]
    assert all("float64" in cell["error"] for cell in refused[1:])
    assert [cell["kind"] for cell in copied] == ["same", "copied", "copied", "same"]
    assert all(cell["bytes_per_second"] > 0 for cell in copied[1:3])
    assert all(cell["exact"] for cell in copied + own)
