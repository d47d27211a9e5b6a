"""The page that ``arraybridge matrix --html`` writes: one file, no network, for any width, light and dark."""

from __future__ import annotations

from html import escape
from typing import Any

from arraybridge.show import Cell, format_bytes, format_rate, format_seconds, html_table

__all__ = ["page"]

Json = dict[str, Any]

_STYLE = """
:root { color-scheme: light dark; --text: #1c2430; --soft: #5a6675; --back: #ffffff; --line: #d8dee6;
  --head: #f3f5f8; --shared: #d9f2e0; --copied: #fdeec9; --same: #eceff3; --refused: #fbdcd9; }
@media (prefers-color-scheme: dark) { :root {
  --text: #e4e9f0; --soft: #9aa7b8; --back: #14181e; --line: #333c48;
  --head: #1d232b; --shared: #17402a; --copied: #4a3a10; --same: #262d36; --refused: #53231f; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1rem; color: var(--text); background: var(--back);
  font: 16px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: .2rem 0; }
h2 { font-size: 1.1rem; margin: 1.8rem 0 .5rem; }
p { margin: .3rem 0 .8rem; color: var(--soft); }
.wide { overflow-x: auto; border: 1px solid var(--line); border-radius: .5rem; }
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
.tag { display: inline-block; padding: 0 .45rem; border-radius: .6rem; }
button { all: unset; cursor: pointer; }
button:focus-visible { outline: 2px solid currentColor; outline-offset: 2px; }
th[aria-sort=ascending] button::after { content: " \\25B2"; }
th[aria-sort=descending] button::after { content: " \\25BC"; }
.legend .tag { color: var(--text); }
.sorters { display: none; margin: .4rem 0; }
@media (max-width: 40rem) {
  .sorters { display: block; }
  #pairs thead { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
  #pairs, #pairs tbody, #pairs tr { display: block; }
  #pairs tr { padding: .5rem .7rem; border-bottom: 1px solid var(--line); }
  #pairs tbody tr:last-child { border-bottom: 0; }
  #pairs td { display: inline-block; border: 0; padding: 0 .5rem 0 0; white-space: normal; }
  #pairs td:empty { display: none; }
  #pairs td[data-name=from], #pairs td[data-name=to] { display: inline; padding: 0; font-weight: 600; }
  #pairs td[data-name=to]::before { content: " \\2192  "; }
  #pairs td[data-name=to]::after { content: "\\A"; white-space: pre; }
  #pairs td[data-name=where]::before { content: "on "; }
  #pairs td[data-name=why] { display: block; color: var(--soft); }
}
select { font: inherit; color: inherit; background: var(--head); padding: .2rem;
  border: 1px solid var(--line); }
"""

# A click on a heading sorts by it, a second one the other way round; on a phone, where there are no headings,
# a list of choices does it.
_PROGRAM = """
"use strict";
const table = document.getElementById("pairs");
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

_COLUMNS = ("from", "to", "memory", "method", "time", "rate", "where", "why")


def page(result: Json) -> str:
    """The page of a measured matrix, as `arraybridge.cli.matrix` makes it."""
    shape = " × ".join(map(str, result["shape"]))
    about = (
        f"{result['dtype']}, {shape}, {format_bytes(result['nbytes'])}."
        f" arraybridge {result['arraybridge']} on {result['machine']}."
    )
    exact = [cell["exact"] for cell in result["cells"] if cell["exact"] is not None]
    verdict = (
        f"All {len(exact)} results are exact, bit for bit."
        if all(exact)
        else f"{exact.count(False)} of {len(exact)} results differ from the original."
    )
    legend = " ".join(
        f'<span class="tag {kind}">{kind}</span> {meaning}.'
        for kind, meaning in (
            ("shared", "both see the same memory"),
            ("copied", "the bytes are copied"),
            ("same", "the very object comes back"),
            ("refused", "the target can't hold it exactly"),
        )
        if any(cell["kind"] == kind for cell in result["cells"])
    )
    missing = "".join(
        f"<p>{escape(name)} left out: {escape(reason)}</p>" for name, reason in result["missing"].items()
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>Conversions on this machine</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>Conversions on this machine</h1>
<p>{escape(about)} {escape(verdict)}</p>
<p class="legend">{legend}</p>
<div class="wide">{_grid(result)}</div>
{_own(result)}
{missing}
<h2>Every pair</h2>
<p class="sorters"><label>Sort by <select id="sorter">{_choices()}</select></label></p>
<div class="wide">{_pairs(result)}</div>
<script>{_PROGRAM}</script>
</body>
</html>
"""


def _own(result: Json) -> str:
    told = ", ".join(
        f"to {cell['target']} {cell['kind']}"
        + (f" in {format_seconds(cell['seconds'])}" if cell["seconds"] else "")
        for cell in result.get("numpy_own", ())
        if cell["kind"] != "same"
    )
    if not told:
        return ""
    return (
        "<p>The NumPy array above is aligned to 64 bytes, as arraybridge.aligned() makes them. One as NumPy"
        f" allocates it, aligned to 16: {escape(told)}.</p>"
    )


def _grid(result: Json) -> str:
    cells = iter(result["cells"])
    labels = result["places"]
    rows = [(label, *(_grid_cell(next(cells)) for _ in labels)) for label in labels]
    return html_table(("from \\ to", *labels), rows, row_heads=True, attributes='class="grid"')


def _grid_cell(cell: Json) -> Cell:
    about = f'class="{cell["kind"]}" title="{escape(cell["reason"] or cell["error"] or "")}"'
    if cell["kind"] == "refused":
        return Cell("refused", about)
    method = "" if cell["kind"] == "same" else f" <small>{cell['method']}</small>"
    return Cell(f"{cell['kind']}{method}<br>{format_seconds(cell['seconds'])}", about)


def _choices() -> str:
    return "".join(
        f'<option value="{column} {way}">{name}{", largest first" if way == "down" else ""}</option>'
        for column, name in enumerate(_COLUMNS[:-1])
        for way in (("up", "down") if name in ("time", "rate") else ("up",))
    )


def _pairs(result: Json) -> str:
    head = [Cell(f"<button>{name}</button>", 'scope="col" aria-sort="none"') for name in _COLUMNS]
    return html_table(head, [_pair(cell) for cell in result["cells"]], attributes='id="pairs"')


def _pair(cell: Json) -> list[Cell]:
    rate, spent = cell["bytes_per_second"], cell["seconds"]
    copies = f" ({cell['copies']} copies)" if cell["copies"] and cell["copies"] > 1 else ""
    texts = (
        cell["source"],
        cell["target"],
        cell["kind"] + copies,
        cell["method"] or "",
        format_seconds(spent),
        format_rate(rate),
        cell["device"] or "",
        cell["reason"] or cell["error"] or "",
    )
    # What has no number comes after everything that has one.
    values = {4: 1e9 if spent is None else spent, 5: -1 if rate is None else rate}
    made = []
    for i, (name, text) in enumerate(zip(_COLUMNS, texts, strict=True)):
        number = f' class="number" data-value="{values[i]:.6g}"' if i in values else ""
        inner = f'<span class="tag {cell["kind"]}">{escape(text)}</span>' if i == 2 else escape(text)
        made.append(Cell(inner, f'data-name="{name}"{number}'))
    return made
