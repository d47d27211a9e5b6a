"""Format counts, choices, bytes, seconds, tables and HTML pages for the whole package."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias


def format_bytes(nbytes: float | None) -> str:
    """Format a number of bytes in binary units; return ``"-"`` for None.

    >>> format_bytes(17), format_bytes(3 << 29)
    ('17 B', '1.5 GiB')
    """
    if nbytes is None:
        return "-"
    if -1024 < nbytes < 1024:
        # Formatting an int as a float takes twice as long, and each route has a number of bytes.
        return f"{nbytes} B" if isinstance(nbytes, int) else f"{nbytes:.0f} B"
    amount = float(nbytes)
    for unit in ("KiB", "MiB", "GiB"):
        amount /= 1024
        if abs(amount) < 1024:
            return f"{amount:.1f} {unit}"
    return f"{amount / 1024:.1f} TiB"


def format_seconds(seconds: float | None) -> str:
    """Format a time; return ``""`` for None.

    >>> format_seconds(12.3e-6), format_seconds(4.56e-3), format_seconds(1.234)
    ('12.3 µs', '4.56 ms', '1.23 s')
    """
    if seconds is None:
        return ""
    if abs(seconds) < 1e-3:
        return f"{seconds * 1e6:.1f} µs"
    return f"{seconds * 1e3:.2f} ms" if abs(seconds) < 1 else f"{seconds:.2f} s"


_IRREGULAR_PLURALS = {"axis": "axes", "entry": "entries", "microbatch": "microbatches"}


def format_count(n: int, noun: str) -> str:
    """Format a number with a noun in the singular or plural.

    >>> format_count(1, "row"), format_count(2, "row"), format_count(0, "axis")
    ('1 row', '2 rows', '0 axes')
    """
    return f"{n} {noun}" if n == 1 else f"{n} {_IRREGULAR_PLURALS.get(noun, noun + 's')}"


def one_of(values: Iterable[object]) -> str:
    """Format the valid values of an argument, for advice such as ``f"Pass {one_of(names)}."``.

    >>> one_of(["numpy", "torch"])
    "one of 'numpy', 'torch'"
    >>> one_of(["cpu"])
    "'cpu'"
    """
    texts = [repr(value) for value in values]
    return texts[0] if len(texts) == 1 else f"one of {', '.join(texts)}"


def either(values: Sequence[object]) -> str:
    """Format the few valid values of an argument, for messages such as ``f"It must be {either(values)}."``.

    >>> either([None, True, False])
    'None, True or False'
    """
    *others, last = map(repr, values)
    return f"{', '.join(others)} or {last}" if others else last


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> str:
    """Format a table as text, with two spaces between columns and without wrapping.

    Args:
        head: The headings.
        rows: The rows, with one string per column. In a shorter row, the last cell extends over the
            remaining columns and may have several lines.
        right: The headings of right-aligned columns.

    >>> print(text_table(("what", "size"), [("one", "4 B"), ("three", "12 B")], right=("size",)))
    what   size
    one     4 B
    three  12 B
    """
    lines = [head, *rows]
    complete = [line for line in lines if len(line) == len(head)]
    widths = [max(map(len, column)) for column in zip(*complete, strict=True)]
    for row in rows:
        if len(row) < len(head):
            for i, cell in enumerate(row[:-1]):
                widths[i] = max(widths[i], len(cell))
    alignments = [str.rjust if heading in right else str.ljust for heading in head]
    aligned = (
        [align(cell, width) for align, cell, width in zip(alignments, line, widths, strict=False)]
        for line in lines
    )
    return "\n".join("  ".join(cells).rstrip() for cells in aligned)


#: Plain text, or a pair of HTML and the attributes of the cell's tag.
Cell: TypeAlias = "str | tuple[str, str]"


def html_table(head: Sequence[Cell], rows: Sequence[Sequence[Cell]], caption: str = "") -> str:
    """Format a table as HTML, and escape plain-text cells.

    Args:
        head: The headings.
        rows: The rows, with one cell per column. The first cell is the heading of the row. In a shorter row,
            the last cell extends over the remaining columns.
        caption: The caption, or ``""`` for none.
    """
    body = []
    for row in rows:
        cells = [_cell("td" if i else "th", cell) for i, cell in enumerate(row)]
        if len(row) < len(head):
            cells[-1] = _cell("td", row[-1], f' colspan="{len(head) - len(row) + 1}"')
        body.append(f"<tr>{''.join(cells)}</tr>")
    top = "".join(_cell("th", cell) for cell in head)
    line = caption and _cell("caption", (_escape(caption).replace("\n", "<br>"), ""))
    return f"<table>{line}<thead><tr>{top}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def _cell(tag: str, cell: Cell, span: str = "") -> str:
    inner, attributes = (_escape(cell), "") if isinstance(cell, str) else cell
    return f"<{tag}{attributes and ' ' + attributes}{span}>{inner}</{tag}>"


#: The headings, the rows, the headings of right-aligned columns, and the line below the table.
Contents: TypeAlias = tuple[Sequence[str], Sequence[Sequence[str]], Sequence[str], str]


class Table:
    """Base class of results that print as a table, including in notebooks."""

    def _table(self) -> Contents:
        """Return the contents of the table. Subclasses override this."""
        raise NotImplementedError

    def __str__(self) -> str:
        head, rows, right, line = self._table()
        return f"{text_table(head, rows, right=right)}\n{line}".rstrip()

    def _repr_html_(self) -> str:
        head, rows, _, line = self._table()
        return html_table(head, rows, line)


# -- pages ----------------------------------------------------------------------------------


def page(title: str, *parts: str) -> str:
    """Return a complete HTML page with the given title, which is also its heading.

    The page is a single file that uses no network, fits a screen 400 pixels wide, and supports dark mode.

    Args:
        title: The title as text.
        parts: The contents as HTML.

    >>> "<h1>a &lt; b</h1>" in page("a < b", "<p>Hello.</p>")
    True
    """
    from importlib.resources import files  # imported on use, because this takes 10 ms
    from string import Template

    template = files("arraybridge").joinpath("page.html").read_text(encoding="utf-8")
    return Template(template).substitute(title=_escape(title), body="\n".join(filter(None, parts)))


def _escape(text: str) -> str:
    from html import escape  # imported on use, because this takes 2 ms

    return escape(text)
