"""Test the formats of bytes, seconds, tables, HTML pages and plots."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from arraybridge.formatting import format_bytes, format_seconds, html_table, page, text_table
from arraybridge.plots import plot_axes

HEAD = ("what", "size", "why")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_bytes(None), "-"),
        (format_bytes(1023), "1023 B"),
        (format_bytes(-(3 << 20)), "-3.0 MiB"),
        (format_bytes(5 << 50), "5120.0 TiB"),
        (format_seconds(None), ""),
        (format_seconds(-2.5e-6), "-2.5 µs"),
        (format_seconds(0.25), "250.00 ms"),
        (format_seconds(90), "90.00 s"),
    ],
)
def test_numbers_are_formatted_with_units(text: str, expected: str) -> None:
    assert text == expected


def test_the_last_cell_of_a_short_row_extends_over_the_other_columns() -> None:
    rows = [("one", "4 B", "y"), ("cpu", "a name much longer than its column\n  and a line below")]
    assert text_table(HEAD, rows, right=("size",)).split("\n") == [
        "what  size  why",
        "one    4 B  y",
        "cpu   a name much longer than its column",
        "  and a line below",
    ]
    assert '<td colspan="2">a name much' in html_table(HEAD, rows)


def test_html_tables_escape_only_cells_that_are_text() -> None:
    made = html_table(("<a>", "b"), [("<x>", ("<b>y</b>", 'class="n"'))], "1 < 2")
    assert made == (
        "<table><caption>1 &lt; 2</caption><thead><tr><th>&lt;a&gt;</th><th>b</th></tr></thead>"
        '<tbody><tr><th>&lt;x&gt;</th><td class="n"><b>y</b></td></tr></tbody></table>'
    )


def test_pages_are_complete_and_use_no_network() -> None:
    text = page("<a & b>", "<p>one</p>", "", "<p>two</p>")
    assert text.startswith("<!DOCTYPE html>")
    assert "<h1>&lt;a &amp; b&gt;</h1>\n<p>one</p>\n<p>two</p>" in text
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text
    for address in ("http:", "https:", "@import", "url("):
        assert address not in text


def test_plots_have_readable_text_on_white_and_do_not_change_matplotlib_settings(tmp_path: Path) -> None:
    settings = dict(pytest.importorskip("matplotlib").rcParams)
    with plot_axes(3, 2, tmp_path / "x.png") as (figure, axes):
        legend = axes.legend(axes.plot([0, 1]), ["line"])
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert figure.get_facecolor() == axes.get_facecolor() == (1, 1, 1, 1)
    assert contrast_on_white(axes.xaxis.label.get_color()) >= 4.5
    assert axes.xaxis.label.get_color() == legend.get_texts()[0].get_color() != "black"
    assert pytest.importorskip("matplotlib").rcParams == settings


def contrast_on_white(color: str) -> float:
    """Return the contrast ratio of WCAG 2 between a color, such as "#3a4450", and white."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 1.05 / (0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05)


def test_the_error_without_matplotlib_contains_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"), plot_axes(3, 2, None):
        pass
