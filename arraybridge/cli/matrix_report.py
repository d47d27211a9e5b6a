"""The table, the HTML page and the plot of ``arraybridge matrix``."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from functools import partial
from html import escape as escape_html
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.markup import escape

from arraybridge.cli import output
from arraybridge.formatting import Cell, format_bytes, format_seconds, html_table, page
from arraybridge.plots import plot_axes

Json = dict[str, Any]
T = TypeVar("T")
_STYLES = {"same": "dim", "shared": "green", "copied": "yellow", "refused": "red"}
#: The label of arrays with the alignment that NumPy chooses. Arrays in other rows are aligned to 64 bytes.
UNALIGNED = "numpy unaligned"
_MEANINGS = {
    "shared": "both arrays use the same memory",
    "copied": "the data is copied",
    "same": "returns the same object",
    "refused": "the target cannot represent the data exactly",
}


def _all_cells(result: Json) -> list[Json]:
    return [*result["cells"], *result["numpy_own"]]


def _title(result: Json) -> str:
    shape = " × ".join(map(str, result["shape"]))
    return f"{result['dtype']}, {shape} ({format_bytes(result['nbytes'])}). Rows: from, columns: to"


def _kinds(result: Json) -> list[str]:
    return [kind for kind in _MEANINGS if any(cell["kind"] == kind for cell in _all_cells(result))]


def _grid(result: Json, render: Callable[[Json], T]) -> list[tuple[str | T, ...]]:
    """Return the rows of the table, each with its source and its rendered cells."""
    count = len(result["places"])
    sources = [*result["places"], *([UNALIGNED] if result["numpy_own"] else [])]
    cells = [render(cell) for cell in _all_cells(result)]
    return [(source, *cells[i * count : (i + 1) * count]) for i, source in enumerate(sources)]


def _remarks(result: Json) -> list[str]:
    """Return the lines below the table as plain text."""
    remarks = [
        f"{cell['source']} → {cell['target']}: the result differs from the original. Please report this."
        for cell in _all_cells(result)
        if cell["exact"] is False
    ]
    if not remarks:
        done = sum(cell["exact"] is True for cell in result["cells"])
        remarks.append(f"All {done} results are equal to the original, bit for bit.")
    if result["numpy_own"]:
        remarks.append(
            f"{UNALIGNED}: large arrays as NumPy allocates them, aligned to 16 bytes. The arrays of the other"
            " rows are aligned to 64 bytes, like those from arraybridge.aligned()."
        )
    refusals = dict.fromkeys(cell["error"] for cell in _all_cells(result) if cell["error"])
    remarks += [f"Refused: {refusal}" for refusal in refusals]
    return remarks + [f"Skipped {name}: {reason}" for name, reason in result["missing"].items()]


def print_result(result: Json) -> None:
    """Print the table, its legend and the remarks."""
    console = output.console()
    console.print(f"{_title(result)}\n")
    columns = ("", *result["places"])
    rows = _grid(result, partial(_cell_text, separator=" "))
    if not output.fits(console, columns, rows):
        rows = _grid(result, partial(_cell_text, separator="\n"))
    console.print(output.table_or_list(console, columns, rows))
    for kind in _kinds(result):
        console.print(f"[{_STYLES[kind]}]{kind:7}[/]  {_MEANINGS[kind]}")
    console.print()
    for remark in _remarks(result):
        console.print(escape(remark))


def _cell_text(cell: Json, *, separator: str) -> str:
    """Return the text of a cell: kind and method, the time, the rate, and a blank line below."""
    kind = f"[{_STYLES[cell['kind']]}]{cell['kind']}[/]"
    method = "" if cell["kind"] in ("same", "refused") else f"{separator}[dim]{cell['method']}[/]"
    figures = (format_seconds(cell["seconds"]), _format_rate(cell["bytes_per_second"]))
    return "\n".join([kind + method, *filter(None, figures), ""])


def _format_rate(bytes_per_second: float | None) -> str:
    """Format a rate in decimal units, as data sheets do: ``"4.2 GB/s"``. Return ``""`` for None."""
    if bytes_per_second is None:
        return ""
    unit, name = (1e9, "GB/s") if bytes_per_second >= 1e8 else (1e6, "MB/s")
    return f"{bytes_per_second / unit:.1f} {name}"


_COLUMNS = ("pair", "memory", "method", "time", "rate", "device", "reason")


def html_page(result: Json) -> str:
    """Return the HTML page that ``--html`` writes."""
    head = ("from \\ to", *result["places"])
    grid = html_table(head, _grid(result, _grid_cell))
    about = f"{_title(result)}. arraybridge {result['arraybridge']} on {result['machine']}."
    return page(
        "Array conversions on this machine",
        f"<p>{escape_html(about)}</p>",
        f"<p>{' '.join(f'{_tag(kind)} {_MEANINGS[kind]}.' for kind in _kinds(result))}</p>",
        f'<div class="wide grid">{grid}</div>',
        *(f"<p>{escape_html(remark)}</p>" for remark in _remarks(result)),
        "<h2>All pairs</h2>",
        f'<div class="wide">{html_table(_COLUMNS, [_pair_row(cell) for cell in _all_cells(result)])}</div>',
    )


def _grid_cell(cell: Json) -> Cell:
    attributes = f'class="{cell["kind"]}" title="{escape_html(cell["reason"] or cell["error"] or "")}"'
    method = "" if cell["kind"] in ("same", "refused") else f" <small>{cell['method']}</small>"
    return f"{cell['kind']}{method}<br>{format_seconds(cell['seconds'])}", attributes


def _pair_row(cell: Json) -> list[Cell]:
    copies = f" ({cell['copies']} copies)" if (cell["copies"] or 0) > 1 else ""
    return [
        f"{cell['source']} → {cell['target']}",
        (_tag(cell["kind"], cell["kind"] + copies), ""),
        cell["method"] or "",
        (format_seconds(cell["seconds"]), 'class="number"'),
        (_format_rate(cell["bytes_per_second"]), 'class="number"'),
        cell["device"] or "",
        cell["reason"] or cell["error"] or "",
    ]


def _tag(kind: str, text: str = "") -> str:
    """Return HTML for text on the color of a kind. The text defaults to the kind."""
    return f'<span class="tag {kind}">{text or kind}</span>'


def plot_times(result: Json, path: Path) -> None:
    """Plot the times as a heat map with a logarithmic scale, annotated with kind and method."""
    labels = result["places"]
    count = len(labels)
    logs = np.array([math.log10(cell["seconds"] or math.nan) for cell in result["cells"]])
    # The scale covers at least a factor of 10, so that similar times get similar colors.
    low = float(np.nanmin(logs, initial=0.0))
    high = max(float(np.nanmax(logs, initial=low)), low + 1)
    color_map = importlib.import_module("matplotlib").colormaps["YlOrRd"].with_extremes(bad="#d9d9d9")
    with plot_axes(2.6 + 1.25 * count, 1.9 + 0.95 * count, path) as (figure, axes):
        image = axes.imshow(logs.reshape(count, count), cmap=color_map, vmin=low, vmax=high, aspect="auto")
        for i, cell in enumerate(result["cells"]):
            lines = [cell["kind"], cell["method"] or "", format_seconds(cell["seconds"])]
            text = "\n".join(filter(None, lines[:1] + lines[1 + (cell["kind"] == "same") :]))
            color = "white" if (logs[i] - low) / (high - low) > 0.73 else "black"
            axes.text(i % count, i // count, text, ha="center", va="center", fontsize=8, color=color)
        axes.set_xticks(range(count), labels, rotation=0 if count < 8 else 30)
        axes.set_yticks(range(count), labels)
        axes.xaxis.tick_top()
        axes.set(xlabel="to", ylabel="from")
        axes.xaxis.set_label_position("top")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        bar = figure.colorbar(image, ax=axes, shrink=0.8, label="time per conversion")
        bar.set_ticks(range(math.ceil(low), math.floor(high) + 1))
        bar.set_ticklabels([format_seconds(10.0**tick) for tick in bar.get_ticks()])
        figure.suptitle(f"{result['dtype']}, {format_bytes(result['nbytes'])}", fontsize=11)
