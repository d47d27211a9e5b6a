"""The one page of HTML, and the one style of pictures."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from arraybridge import pages
from arraybridge.show import Cell


def test_a_page_is_whole_and_needs_no_network() -> None:
    text = pages.page("<a & b>", "<p>one</p>", "", "<p>two</p>")
    assert text.startswith("<!DOCTYPE html>")
    assert "<h1>&lt;a &amp; b&gt;</h1>\n<p>one</p>\n<p>two</p>" in text
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text
    for address in ("http:", "https:", "@import", "url("):
        assert address not in text


def test_a_table_that_sorts_has_a_button_for_each_column_and_both_ways_for_numbers() -> None:
    rows = [("a", Cell("1 s", 'data-value="1"')), ("<b>", Cell("2 s", 'data-value="2"'))]
    text = pages.sortable_table(("name", "time"), rows, ("time",))
    assert text.count("<button>") == 2
    assert "&lt;b&gt;" in text
    for choice in ('value="0 up">name', 'value="1 up">time', 'value="1 down">time, largest first'):
        assert choice in text
    assert 'value="0 down"' not in text


def test_a_figure_is_saved_by_its_suffix(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawing, axes = pages.figure(3, 2)
    axes.plot([0, 1], [1, 0], color=pages.COLOURS["cpu"])
    assert pages.save_figure(drawing, tmp_path / "x.png") is drawing
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert pages.save_figure(drawing, None) is drawing


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        pages.figure(3, 2)
