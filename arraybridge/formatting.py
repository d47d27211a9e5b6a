"""Bytes, seconds, tables, pages and pictures for a reader: the only ones in the house."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias


def format_bytes(nbytes: float | None) -> str:
    """A number of bytes, in binary units; ``"-"`` for None.

    >>> format_bytes(17), format_bytes(3 << 29)
    ('17 B', '1.5 GiB')
    """
    if nbytes is None:
        return "-"
    amount = float(nbytes)
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(amount) >= 1024 and len(units) > 1:
        amount /= 1024
        del units[0]
    return f"{amount:.{0 if units[0] == 'B' else 1}f} {units[0]}"


def format_seconds(seconds: float | None) -> str:
    """A time; nothing for None.

    >>> format_seconds(12.3e-6), format_seconds(4.56e-3), format_seconds(1.234)
    ('12.3 µs', '4.56 ms', '1.23 s')
    """
    if seconds is None:
        return ""
    if abs(seconds) < 1e-3:
        return f"{seconds * 1e6:.1f} µs"
    return f"{seconds * 1e3:.2f} ms" if abs(seconds) < 1 else f"{seconds:.2f} s"


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> str:
    """A table as text: columns side by side, two blanks between them, and no line broken.

    Args:
        head: the headings.
        rows: a text for each column; in a row of fewer cells the last one runs over the columns that are
            left, and may have several lines.
        right: the headings of the columns that are set flush right.

    >>> print(text_table(("what", "size"), [("one", "4 B"), ("three", "12 B")], right=("size",)))
    what   size
    one     4 B
    three  12 B
    """
    lines = [head, *rows]
    widths = [
        max(len(line[i]) for line in lines if i < len(line) - 1 or len(line) == len(head))
        for i in range(len(head))
    ]

    def padded(cell: str, width: int, heading: str) -> str:
        return cell.rjust(width) if heading in right else cell.ljust(width)

    return "\n".join("  ".join(map(padded, line, widths, head)).rstrip() for line in lines)


#: A text; or HTML, and the attributes of the cell's tag.
Cell: TypeAlias = "str | tuple[str, str]"


def html_table(head: Sequence[Cell], rows: Sequence[Sequence[Cell]], caption: str = "") -> str:
    """A table as HTML. Texts are escaped, and what is HTML is taken as it is.

    Args:
        head: the headings.
        rows: a cell for each column, the first of which is the row's heading; in a row of fewer cells the
            last one runs over the columns that are left.
        caption: a line above or below the table, as the page has it.
    """
    body = []
    for row in rows:
        cells = [_cell("td" if i else "th", cell) for i, cell in enumerate(row)]
        if len(row) < len(head):
            cells[-1] = _cell("td", row[-1], f' colspan="{len(head) - len(row) + 1}"')
        body.append(f"<tr>{''.join(cells)}</tr>")
    top = "".join(_cell("th", cell) for cell in head)
    line = caption and _cell("caption", caption)
    return f"<table>{line}<thead><tr>{top}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def _cell(tag: str, cell: Cell, span: str = "") -> str:
    inner, attributes = (_escaped(cell), "") if isinstance(cell, str) else cell
    return f"<{tag}{attributes and ' ' + attributes}{span}>{inner}</{tag}>"


#: The headings, the rows, the headings of columns that are set flush right, and a line below.
Contents: TypeAlias = tuple[Sequence[str], Sequence[Sequence[str]], Sequence[str], str]


class Table:
    """What prints as a table, also in a notebook; subclasses say which."""

    def _table(self) -> Contents:
        raise NotImplementedError

    def __str__(self) -> str:
        head, rows, right, line = self._table()
        return f"{text_table(head, rows, right=right)}\n{line}".rstrip()

    def _repr_html_(self) -> str:
        head, rows, _, line = self._table()
        return html_table(head, rows, line)


# -- pages and pictures --------------------------------------------------------------------------------


def page(title: str, *parts: str) -> str:
    """A whole page; ``parts`` are HTML already, and ``title`` is its heading, too.

    It is one file that needs no network, fits a phone of 400 pixels, and follows the reader's dark mode.

    >>> "<h1>a &lt; b</h1>" in page("a < b", "<p>Hello.</p>")
    True
    """
    from importlib.resources import files  # costs 10 ms, and only a page needs it
    from string import Template

    template = files("arraybridge").joinpath("page.html").read_text(encoding="utf-8")
    return Template(template).substitute(title=_escaped(title), body="\n".join(filter(None, parts)))


def _escaped(text: str) -> str:
    from html import escape  # costs 2 ms, and only a notebook or a page needs it

    return escape(text)


#: What is drawn → its colour, the same in every picture and on every page. Copies are red.
COLOURS = {
    **dict.fromkeys(("stage", "item"), "#4c78a8"),
    **dict.fromkeys(("conversion", "foreign"), "#9ecae9"),
    **dict.fromkeys(("retry", "split"), "#f58518"),
    "call": "#72b7b2",
    "decision": "#b279a2",
    "copy": "#e45756",
    "clean-up": "#eeca3b",
}

_INK = "#3a4450"

#: matplotlib settings for all plots: dark text on white, also on dark pages.
PICTURE: dict[Any, Any] = {
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "white"),
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor"), _INK),
    **dict.fromkeys(("xtick.color", "ytick.color", "grid.color"), _INK),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
}


@contextmanager
def picture(width: float, height: float, path: str | os.PathLike[str] | None) -> Iterator[tuple[Any, Any]]:
    """A figure of matplotlib's and its axes, in inches, in the style of this house; opens no window.

    It is written at the end, if there is a path, whose suffix says the form.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib; run pip install matplotlib") from error
    with rc_context(PICTURE):
        drawing = Figure(figsize=(width, height), layout="constrained")
        axes = drawing.subplots()
        axes.tick_params(labelsize=8)
        yield drawing, axes
        if path is not None:
            drawing.savefig(path, dpi=150)
