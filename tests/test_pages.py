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


def test_a_picture_has_no_ground_of_its_own_and_leaves_the_settings_as_they_are(tmp_path: Path) -> None:
    settings = dict(pytest.importorskip("matplotlib").rcParams)
    with pages.picture(3, 2, tmp_path / "x.png") as (drawing, axes):
        legend = axes.legend(axes.plot([0, 1]), ["line"])
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert drawing.get_facecolor()[3] == axes.get_facecolor()[3] == 0
    assert axes.xaxis.label.get_color() == legend.get_texts()[0].get_color() != "black"
    assert pytest.importorskip("matplotlib").rcParams == settings


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"), pages.picture(3, 2, None):
        pass
