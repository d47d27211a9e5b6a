"""Bytes, seconds and tables in words."""

from __future__ import annotations

from arraybridge.show import Cell, format_bytes, format_seconds, html_table, text_table

HEAD = ("what", "size", "why")
ROWS = [("one", "4 B", "a sentence of several words"), ("three", "12 B", "")]


def test_numbers() -> None:
    sizes = {
        None: "-",
        0: "0 B",
        1023: "1023 B",
        1024: "1.0 KiB",
        -(3 << 20): "-3.0 MiB",
        5 << 50: "5120.0 TiB",
    }
    assert {value: format_bytes(value) for value in sizes} == sizes
    times = {None: "", 0: "0.0 µs", -2.5e-6: "-2.5 µs", 0.25: "250.00 ms", 90: "90.00 s"}
    assert {value: format_seconds(value) for value in times} == times


def test_a_table_breaks_no_line() -> None:
    assert text_table(HEAD, ROWS, right=("size",)).split("\n") == [
        "what   size  why",
        "one     4 B  a sentence of several words",
        "three  12 B",
    ]
    assert text_table(HEAD, []) == "what  size  why"


def test_the_last_cell_of_a_short_row_runs_over_the_rest_and_a_cell_may_have_several_lines() -> None:
    rows = [("cpu", "a name much longer than its column"), ("", "1\n2", "y")]
    assert text_table(HEAD, rows).split("\n") == [
        "what  size  why",
        "cpu   a name much longer than its column",
        "      1     y",
        "      2",
    ]
    assert '<td colspan="2">a name much' in html_table(HEAD, rows)


def test_what_is_too_wide_becomes_a_block_a_row() -> None:
    wide = text_table(HEAD, ROWS, width=40)
    assert "\n" in wide
    assert wide.startswith("what")
    assert text_table(HEAD, ROWS, width=39).split("\n") == [
        "one",
        "  size  4 B",
        "  why   a sentence of several words",
        "three",
        "  size  12 B",
    ]


def test_html_is_escaped_but_for_what_is_html() -> None:
    made = html_table(("<a>", "b"), [("<x>", Cell("<b>y</b>", 'class="n"'))], caption="1 < 2", row_heads=True)
    assert made == (
        "<table><caption>1 &lt; 2</caption><thead><tr><th>&lt;a&gt;</th><th>b</th></tr></thead>"
        '<tbody><tr><th>&lt;x&gt;</th><td class="n"><b>y</b></td></tr></tbody></table>'
    )
