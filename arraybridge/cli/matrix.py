"""``arraybridge matrix``: convert between every pair of frameworks on this machine and time it."""

from __future__ import annotations

import importlib
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import escape as escape_html
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import typer
from rich.markup import escape
from rich.progress import Progress

import arraybridge
from arraybridge.cli import output
from arraybridge.errors import DtypeNotSupportedError, MemoryConversionError
from arraybridge.formatting import Cell, format_bytes, format_seconds, html_table, page, plot_axes
from arraybridge.frameworks import dtype_names
from arraybridge.frameworks.installation import can_find
from arraybridge.types import Device

Json = dict[str, Any]
T = TypeVar("T")
_STYLES = {"same": "dim", "shared": "green", "copied": "yellow", "refused": "red"}
#: The label of arrays with the alignment that NumPy chooses. Arrays in other rows are aligned to 64 bytes.
UNALIGNED = "numpy unaligned"
_ROUNDS = 9
_MEANINGS = {
    "shared": "both arrays use the same memory",
    "copied": "the data is copied",
    "same": "returns the same object",
    "refused": "the target cannot represent the data exactly",
}


#: Label of a row and a column → the framework and its device.
Places = Mapping[str, tuple[str, Device]]


def matrix(
    size: Annotated[str, typer.Option(help="Size of the array, such as 64KiB.", metavar="SIZE")] = "4MiB",
    dtype: Annotated[str, typer.Option(help="NumPy dtype of the array.", metavar="DTYPE")] = "float32",
    frameworks: output.Frameworks = None,
    html: Annotated[
        Path | None, typer.Option(help="Write the table as an HTML page.", metavar="FILE")
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option(help="Plot the times (.png, .svg, .pdf). Requires matplotlib.", metavar="FILE"),
    ] = None,
    as_json: output.AsJson = False,
) -> None:
    """Convert an array between all frameworks on this machine, and show how each pair is converted.

    Each cell shows whether the memory is shared or copied, the method, and the time.
    Every result is compared with the original, bit for bit.
    The exit code is 1 if a result differs.

    Examples:
    [bold]arraybridge matrix[/bold]

    [bold]arraybridge matrix --size 64MiB --dtype uint16 --frameworks numpy,torch[/bold]

    [bold]arraybridge matrix --html matrix.html --png matrix.png[/bold]
    """
    array = _make_array(output.parse_size(size), dtype)
    output.check_writable(html, "--html")
    output.check_writable(png, "--png", ".png", ".svg", ".pdf")
    if png is not None and not can_find("matplotlib"):
        raise typer.BadParameter(
            "The heat map requires matplotlib, which is not installed. Run pip install matplotlib.",
            param_hint="--png",
        )
    names = output.parse_frameworks(frameworks)
    with output.reserve_stdout(as_json):
        available, missing = output.usable_frameworks(names)
        places = list_places(available)
        with output.progress_bar() as bar:
            cells, unaligned = measure(places, array, bar)
    result: Json = {
        "arraybridge": arraybridge.__version__,
        "machine": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "dtype": array.dtype.name,
        "shape": list(array.shape),
        "nbytes": array.nbytes,
        "places": list(places),
        "cells": cells,
        "numpy_own": unaligned,
        "missing": missing,
    }
    if html is not None:
        html.write_text(html_page(result), encoding="utf-8")
    if png is not None and places:
        _plot_times(result, png)
    if as_json:
        output.print_json(result)
    else:
        print_result(result)
        for path in filter(None, (html, png)):
            output.console(stderr=True).print(f"Wrote {path}", style="dim")
    raise typer.Exit(1 if any(cell["exact"] is False for cell in cells + unaligned) else 0)


def _make_array(nbytes: int, name: str) -> np.ndarray:
    """Return an array of this size in aligned memory that every framework can share.

    Large arrays have the shape (rows, 1024), small ones have one axis.
    """
    try:
        dtype = dtype_names.np_dtype(name)  # includes bfloat16 and float8 types if ml_dtypes is installed
    except (TypeError, AttributeError, DtypeNotSupportedError):
        raise typer.BadParameter(
            f"{name!r} is not a known dtype. Use a name such as float32. For bfloat16, run"
            " pip install ml-dtypes.",
            param_hint="--dtype",
        ) from None
    if dtype.kind not in "biufcV" or dtype.names or not dtype.itemsize:
        raise typer.BadParameter(
            f"{name} is not a numeric dtype. Use a name such as float32.", param_hint="--dtype"
        )
    count = max(1, nbytes // dtype.itemsize)
    shape = (count // 1024, 1024) if count % 1024 == 0 else (count,)
    # Small numbers that every dtype can represent.
    values = np.resize(np.arange(100, dtype=np.uint8), count)
    plain = (values % 2).astype(dtype) if dtype.kind == "b" else values.astype(dtype)
    # copy=True returns aligned memory.
    return arraybridge.to_numpy(plain.reshape(shape), copy=True)


def _copy_unaligned(array: np.ndarray) -> np.ndarray:
    """Return a copy in memory as NumPy allocates it for large arrays: 16 bytes past a multiple of 64.

    NumPy aligns memory to 16 bytes. Small arrays are aligned to 64 bytes by chance; large ones never are.
    """
    memory = arraybridge.aligned(array.nbytes + 16, "uint8")[16:]
    unaligned = memory.view(array.dtype).reshape(array.shape)
    unaligned[...] = array
    return unaligned


# -- measuring ---------------------------------------------------------------------------------------


def list_places(names: list[str]) -> Places:
    """List the host and the first accelerator of each framework, as far as it supports them."""
    places: dict[str, tuple[str, Device]] = {}
    for name in names:
        first = {device.kind: device for device in reversed(arraybridge.framework(name).devices.available())}
        host = [first.pop("cpu")] if "cpu" in first else []
        devices = [*host, *first.values()][: len(host) + 1]
        places |= {f"{name} {one}" if len(devices) > 1 else name: (name, one) for one in devices}
    return places


def measure(places: Places, array: np.ndarray, bar: Progress) -> tuple[list[Json], list[Json]]:
    """Convert between every pair of places, and from an unaligned NumPy array to every place.

    Returns:
        One dictionary per pair, and the same for the unaligned array.
    """
    cells: list[Json] = []
    for source, (framework, device) in bar.track(places.items(), description="Converting"):
        make = partial(arraybridge.convert_memory, array, framework, device=device, copy=True)
        cells += _measure_row(source, make, places, array)
    frameworks = [arraybridge.framework(framework) for framework, _ in places.values()]
    has_numpy = any(framework.devices.has_only_host for framework in frameworks)
    if len(places) == 1 or not has_numpy:
        return cells, []
    return cells, _measure_row(UNALIGNED, partial(_copy_unaligned, array), places, array)


def _measure_row(source: str, make: Callable[[], Any], places: Places, array: np.ndarray) -> list[Json]:
    """Convert an array made by ``make`` to each place; return one dictionary per place."""
    row = []
    for target, (framework, device) in places.items():
        try:
            cell = _convert(make(), framework, device, array)
        except MemoryConversionError as error:
            unknown = ("method", "device", "shares_memory", "copies", "reason", "seconds")
            cell = {"nbytes": array.nbytes, "kind": "refused", "error": str(error)}
            cell |= dict.fromkeys((*unknown, "bytes_per_second", "exact"))
        row.append(cell | {"source": source, "target": target})
    return row


def _convert(x: Any, framework: str, device: Device, array: np.ndarray) -> Json:
    route = arraybridge.explain(x, framework)
    # Omit the device if it is the default one, as most programs do.
    options: Json = {} if route.device == device else {"device": device}
    if options:
        route = arraybridge.explain(x, framework, **options)
    convert = partial(arraybridge.convert_memory, x, framework, **options)
    result = arraybridge.to_numpy(convert())
    exact = result.dtype == array.dtype and result.shape == array.shape
    exact = exact and np.ascontiguousarray(result).tobytes() == array.tobytes()
    seconds = output.make_timer(convert)(_ROUNDS)
    # Shared memory is not moved, so it has no rate.
    rate = None if route.shares_memory or not seconds else route.nbytes / seconds
    measured = {"seconds": seconds, "bytes_per_second": rate, "exact": exact}
    return route.to_dict() | measured | {"kind": _kind(route), "error": None}


def _kind(route: arraybridge.Route) -> str:
    if route.method == "same":
        return "same"
    return "shared" if route.shares_memory else "copied"


# -- text --------------------------------------------------------------------------------------------


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
    rows = _grid(result, _cell_text)
    if not output.fits(console, columns, rows):
        rows = _grid(result, _narrow_cell_text)
    console.print(output.table_or_list(console, columns, rows))
    for kind in _kinds(result):
        console.print(f"[{_STYLES[kind]}]{kind:7}[/]  {_MEANINGS[kind]}")
    console.print()
    for remark in _remarks(result):
        console.print(escape(remark))


def _cell_text(cell: Json) -> str:
    """Return kind and method, the time, the rate, and a blank line that separates the rows."""
    kind, method, *figures = _cell_lines(cell)
    return "\n".join([f"{kind} {method}".rstrip(), *filter(None, figures), ""])


def _narrow_cell_text(cell: Json) -> str:
    """Return the text of a cell with kind and method on separate lines, for narrow terminals."""
    return "\n".join([*filter(None, _cell_lines(cell)), ""])


def _cell_lines(cell: Json) -> list[str]:
    kind = f"[{_STYLES[cell['kind']]}]{cell['kind']}[/]"
    method = "" if cell["kind"] in ("same", "refused") else f"[dim]{cell['method']}[/]"
    return [kind, method, format_seconds(cell["seconds"]), _format_rate(cell["bytes_per_second"])]


def _format_rate(bytes_per_second: float | None) -> str:
    """Format a rate in decimal units, as data sheets do: ``"4.2 GB/s"``. Return ``""`` for None."""
    if bytes_per_second is None:
        return ""
    unit, name = (1e9, "GB/s") if bytes_per_second >= 1e8 else (1e6, "MB/s")
    return f"{bytes_per_second / unit:.1f} {name}"


# -- page and heat map -------------------------------------------------------------------------------

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
        sortable_table(_COLUMNS, [_pair_row(cell) for cell in _all_cells(result)], ("time", "rate")),
    )


def _grid_cell(cell: Json) -> Cell:
    attributes = f'class="{cell["kind"]}" title="{escape_html(cell["reason"] or cell["error"] or "")}"'
    method = "" if cell["kind"] in ("same", "refused") else f" <small>{cell['method']}</small>"
    return f"{cell['kind']}{method}<br>{format_seconds(cell['seconds'])}", attributes


def _pair_row(cell: Json) -> list[Cell]:
    rate = cell["bytes_per_second"]
    seconds = cell["seconds"]
    copies = f" ({cell['copies']} copies)" if (cell["copies"] or 0) > 1 else ""
    # Cells without a number get a value that sorts after all others.
    return [
        f"{cell['source']} → {cell['target']}",
        (_tag(cell["kind"], cell["kind"] + copies), ""),
        cell["method"] or "",
        (format_seconds(seconds), f'class="number" data-value="{seconds or 1e9:.6g}"'),
        (_format_rate(rate), f'class="number" data-value="{rate or -1:.6g}"'),
        cell["device"] or "",
        cell["reason"] or cell["error"] or "",
    ]


def _tag(kind: str, text: str = "") -> str:
    """Return HTML for text on the color of a kind. The text defaults to the kind."""
    return f'<span class="tag {kind}">{text or kind}</span>'


def sortable_table(columns: Sequence[str], rows: Sequence[Sequence[Cell]], numbers: Sequence[str]) -> str:
    """Return the HTML of a table that sorts by clicking a heading. A page has at most one.

    On a phone the table becomes a list of blocks.

    Args:
        columns: The headings. On a phone, the cells of the first and the last column have separate lines.
        rows: One cell per column. The cells of ``numbers`` have the attribute ``data-value``.
        numbers: The headings of columns that sort by number, in both directions.
    """
    heads = [(f"<button>{name}</button>", 'scope="col" aria-sort="none"') for name in columns]
    choices = "".join(
        f'<option value="{column} {order}">{name}{", largest first" if order == "down" else ""}</option>'
        for column, name in enumerate(columns)
        for order in (("up", "down") if name in numbers else ("up",))
    )
    return (
        f'<p class="sorters"><label>Sort by <select id="sorter">{choices}</select></label></p>\n'
        f'<div class="wide" id="sortable">{html_table(heads, rows)}</div>'
    )


def _plot_times(result: Json, path: Path) -> None:
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
