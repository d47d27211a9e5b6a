"""The one page of HTML and the one style of pictures: whatever is drawn or written for a browser looks so.

A page is one file that needs no network, fits a phone of 400 pixels, and follows the reader's dark mode.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from arraybridge.show import Cell, html_table

__all__ = ["COLOURS", "page", "picture", "sortable_table", "tag"]

#: What is drawn → its colour, the same in every picture and on every page. Copies are red.
COLOURS = {
    "cpu": "#4c78a8",
    "gpu": "#54a24b",
    "stage": "#4c78a8",
    "item": "#4c78a8",
    "call": "#72b7b2",
    "decision": "#b279a2",
    "conversion": "#9ecae9",
    "foreign": "#9ecae9",
    "copy": "#e45756",
    "clean-up": "#eeca3b",
    "retry": "#f58518",
    "split": "#f58518",
    "grow": "#f58518",
}

_INK = "#76808d"

#: Settings of matplotlib for all pictures: transparent, with strokes that show on white and on black.
PICTURE: dict[Any, Any] = {
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor"), _INK),
    **dict.fromkeys(("xtick.color", "ytick.color", "grid.color"), _INK),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
}


def page(title: str, *parts: str) -> str:
    """A whole page; ``parts`` are HTML already, and ``title`` is its heading, too.

    >>> "<h1>a &lt; b</h1>" in page("a < b", "<p>Hello.</p>")
    True
    """
    from html import escape  # costs 2 ms, and only a page needs it

    style = _beside("page.css")
    body = "\n".join(filter(None, parts))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>
{style}</style>
</head>
<body>
<h1>{escape(title)}</h1>
{body}
</body>
</html>
"""


def _beside(name: str) -> str:
    """The text of a file that comes with the package."""
    from importlib.resources import files  # costs 10 ms, and only a page needs it

    return files("arraybridge").joinpath(name).read_text(encoding="utf-8")


def tag(kind: str, words: str = "") -> str:
    """A word on the colour of its kind: ``shared``, ``copied``, ``same`` or ``refused``; HTML."""
    return f'<span class="tag {kind}">{words or kind}</span>'


def sortable_table(
    columns: Sequence[str], rows: Sequence[Sequence[str | Cell]], numbers: Sequence[str]
) -> str:
    """A table that sorts by a click, and on a phone becomes a list of blocks; one for each page.

    Args:
        columns: the headings; on a phone the first one and the last one have lines of their own.
        rows: a cell for each column; those of ``numbers`` have the attribute ``data-value``.
        numbers: the columns that sort by number, either way.
    """
    heads = [Cell(f"<button>{name}</button>", 'scope="col" aria-sort="none"') for name in columns]
    choices = "".join(
        f'<option value="{column} {way}">{name}{", largest first" if way == "down" else ""}</option>'
        for column, name in enumerate(columns)
        for way in (("up", "down") if name in numbers else ("up",))
    )
    table = html_table(heads, rows, attributes='id="sortable"')
    return (
        f'<p class="sorters"><label>Sort by <select id="sorter">{choices}</select></label></p>\n'
        f'<div class="wide">{table}</div>\n'
        f"<script>\n{_beside('sorting.js')}</script>"
    )


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
