"""The one page of HTML and the one style of pictures: whatever is drawn or written for a browser looks so.

A page is one file that needs no network, fits a phone of 400 pixels, and follows the reader's dark mode.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from arraybridge.show import Cell, html_table

__all__ = ["COLOURS", "PICTURE", "page", "picture", "sortable_table", "tag"]

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
PICTURE = {
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor"), _INK),
    **dict.fromkeys(("xtick.color", "ytick.color", "grid.color"), _INK),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
}

_STYLE = """
:root { color-scheme: light dark; --text: #1c2430; --soft: #5a6675; --back: #ffffff; --line: #d8dee6;
  --head: #f3f5f8; --shared: #d9f2e0; --copied: #fdeec9; --same: #eceff3; --refused: #fbdcd9;
  --hot: #e45756; }
@media (prefers-color-scheme: dark) { :root {
  --text: #e4e9f0; --soft: #9aa7b8; --back: #14181e; --line: #333c48;
  --head: #1d232b; --shared: #17402a; --copied: #4a3a10; --same: #262d36; --refused: #53231f; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1rem; color: var(--text); background: var(--back);
  font: 16px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: .2rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 1.8rem 0 .5rem; }
p { margin: .3rem 0 .8rem; color: var(--soft); }
.wide { overflow-x: auto; margin: .3rem 0 .8rem; border: 1px solid var(--line); border-radius: .5rem; }
table { border-collapse: separate; border-spacing: 0; width: 100%; font-size: .9rem; }
th, td { padding: .45rem .6rem; text-align: left; border-bottom: 1px solid var(--line); vertical-align: top; }
tbody tr:last-child > * { border-bottom: 0; }
thead th { background: var(--head); white-space: nowrap; }
.grid th:first-child { background: var(--head); position: sticky; left: 0;
  border-right: 1px solid var(--line); }
.grid td { border-left: 1px solid var(--line); white-space: nowrap; }
.grid small { color: var(--soft); }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.shared { background: var(--shared); } .copied { background: var(--copied); }
.same { background: var(--same); } .refused { background: var(--refused); }
.tag { display: inline-block; padding: 0 .45rem; border-radius: .6rem; color: var(--text); }
article { border-top: 1px solid var(--line); padding: .7rem 0; }
article p { color: inherit; margin: .25rem 0; overflow-wrap: anywhere; }
.head { display: flex; flex-wrap: wrap; gap: .2rem 1rem; font-variant-numeric: tabular-nums; }
.head span:last-child, article p.soft { color: var(--soft); }
.bar { height: 4px; background: var(--hot); border-radius: 2px; margin: .3rem 0; min-width: 1px; }
.advice::before { content: "\\2192  "; }
pre { margin: .3rem 0; padding: .4rem .6rem; background: var(--head); border-radius: .3rem;
  overflow-x: auto; }
svg { display: block; min-width: 46rem; width: 100%; height: auto; }
svg text { fill: currentColor; font: 11px system-ui, sans-serif; }
svg line { stroke: var(--line); }
.key span { white-space: nowrap; margin-right: 1rem; }
.key i { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px; margin-right: .3rem; }
button { all: unset; cursor: pointer; }
button:focus-visible { outline: 2px solid currentColor; outline-offset: 2px; }
th[aria-sort=ascending] button::after { content: " \\25B2"; }
th[aria-sort=descending] button::after { content: " \\25BC"; }
select { font: inherit; color: inherit; background: var(--head); padding: .2rem;
  border: 1px solid var(--line); }
.sorters { display: none; margin: .4rem 0; }
@media (max-width: 40rem) {
  .sorters { display: block; }
  #sortable thead { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
  #sortable, #sortable tbody, #sortable tr { display: block; }
  #sortable tr { padding: .5rem .7rem; border-bottom: 1px solid var(--line); }
  #sortable tbody tr:last-child { border-bottom: 0; }
  #sortable td { display: inline-block; border: 0; padding: 0 .5rem 0 0; white-space: normal; }
  #sortable td:empty { display: none; }
  #sortable td:first-child { display: block; font-weight: 600; }
  #sortable td:last-child { display: block; color: var(--soft); }
}
"""

# A click on a heading sorts by it, a second one the other way round; on a phone, where there are no headings,
# a list of choices does it.
_SORTING = """
"use strict";
const table = document.getElementById("sortable");
const heads = [...table.tHead.rows[0].cells];
function key(row, column) {
  const cell = row.cells[column];
  return "value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent;
}
function sortBy(column, descending) {
  const rows = [...table.tBodies[0].rows];
  rows.sort((a, b) => {
    const x = key(a, column), y = key(b, column);
    const order = typeof x === "number" ? x - y : x.localeCompare(y);
    return descending ? -order : order;
  });
  table.tBodies[0].append(...rows);
  heads.forEach((head, i) => head.setAttribute("aria-sort",
    i !== column ? "none" : descending ? "descending" : "ascending"));
}
heads.forEach((head, column) => head.querySelector("button").addEventListener("click",
  () => sortBy(column, head.getAttribute("aria-sort") === "ascending")));
document.getElementById("sorter").addEventListener("change", event => {
  const [column, way] = event.target.value.split(" ");
  sortBy(Number(column), way === "down");
});
"""


def page(title: str, *parts: str) -> str:
    """A whole page; ``parts`` are HTML already, and ``title`` is its heading, too.

    >>> "<h1>a &lt; b</h1>" in page("a < b", "<p>Hello.</p>")
    True
    """
    from html import escape  # costs 2 ms, and only a page needs it

    body = "\n".join(filter(None, parts))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
{body}
</body>
</html>
"""


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
        f"<script>{_SORTING}</script>"
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
