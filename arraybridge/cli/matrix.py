"""``arraybridge matrix``: every pair of frameworks on this machine, converted and measured."""

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
from arraybridge.formatting import Cell, format_bytes, format_seconds, html_table, page, picture
from arraybridge.frameworks import dtype_names
from arraybridge.frameworks.registry import can_find
from arraybridge.types import Device

Json = dict[str, Any]
T = TypeVar("T")
_STYLES = {"same": "dim", "shared": "green", "copied": "yellow", "refused": "red"}
#: The label of arrays in memory that NumPy itself allocated; those of the other rows are aligned to 64 bytes.
OWN = "numpy's own"
_ROUNDS = 9
_MEANINGS = {
    "shared": "both use the same memory",
    "copied": "the bytes are copied",
    "same": "the very object comes back",
    "refused": "the target can't hold it exactly",
}


#: A framework, and a device of it, by what the pair is called.
Places = Mapping[str, tuple[str, Device]]


def matrix(
    size: Annotated[str, typer.Option(help="Bytes of the array that is converted: 4MiB, 64KiB.")] = "4MiB",
    dtype: Annotated[str, typer.Option(help="Its dtype, as NumPy names it.")] = "float32",
    frameworks: output.Frameworks = None,
    html: Annotated[Path | None, typer.Option(help="Write a page of its own, for any browser.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw a heat map of the times. Needs matplotlib.")] = None,
    as_json: output.AsJson = False,
) -> None:
    """Convert an array between all frameworks of this machine, and show how each pair travels.

    Each cell says whether memory is shared or copied, by which method, and how long it took; every result is
    compared with the original, bit for bit. The exit code is 1 when one differs.

    Examples:
    [bold]arraybridge matrix[/bold]

    [bold]arraybridge matrix --size 64MiB --dtype uint16 --frameworks numpy,torch[/bold]

    [bold]arraybridge matrix --html matrix.html --png matrix.png[/bold]
    """
    array = _array(output.size_in_bytes(size), dtype)
    output.writable(html, "--html")
    output.writable(png, "--png", ".png", ".svg", ".pdf")
    if png is not None and not can_find("matplotlib"):
        raise typer.BadParameter("pictures need matplotlib; run pip install matplotlib", param_hint="--png")
    names = output.chosen_frameworks(frameworks)
    with output.stdout_is_for_json(as_json):
        available, missing = output.usable(names)
        places = places_of(available)
        with output.progress() as bar:
            cells, own = measure(places, array, bar)
    result: Json = {
        "arraybridge": arraybridge.__version__,
        "machine": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "dtype": array.dtype.name,
        "shape": list(array.shape),
        "nbytes": array.nbytes,
        "places": list(places),
        "cells": cells,
        "numpy_own": own,
        "missing": missing,
    }
    if html is not None:
        html.write_text(document(result), encoding="utf-8")
    if png is not None and places:
        _heat_map(result, png)
    if as_json:
        output.print_json(result)
    else:
        _print(result)
        for path in filter(None, (html, png)):
            output.console(stderr=True).print(f"wrote {path}", style="dim")
    raise typer.Exit(1 if any(cell["exact"] is False for cell in cells + own) else 0)


def _array(nbytes: int, name: str) -> np.ndarray:
    """An array of that size, in two axes where it is large, in memory that every framework can share."""
    try:
        dtype = dtype_names.np_dtype(name)  # also bfloat16 and the float8 types, where ml_dtypes is installed
    except (TypeError, AttributeError, DtypeNotSupportedError):
        words = f"{name!r} is no dtype here; write it like float32 (bfloat16 needs pip install ml-dtypes)"
        raise typer.BadParameter(words, param_hint="--dtype") from None
    if dtype.kind not in "biufcV" or dtype.names or not dtype.itemsize:
        raise typer.BadParameter(f"{name} is no dtype of numbers", param_hint="--dtype")
    count = max(1, nbytes // dtype.itemsize)
    shape = (count // 1024, 1024) if count % 1024 == 0 else (count,)
    # Small numbers, which every dtype has.
    values = np.resize(np.arange(100, dtype=np.uint8), count)
    plain = (values % 2).astype(dtype) if dtype.kind == "b" else values.astype(dtype)
    # copy=True places it in aligned memory.
    return arraybridge.to_numpy(plain.reshape(shape), copy=True)


def _as_numpy_allocates(array: np.ndarray) -> np.ndarray:
    """A copy in memory like that of NumPy's own large arrays: 16 bytes past an address divisible by 64.

    NumPy aligns to 16 bytes. Small arrays are aligned to 64 by chance, large ones never are.
    """
    room = arraybridge.aligned(array.nbytes + 16, "uint8")[16:]
    own = room.view(array.dtype).reshape(array.shape)
    own[...] = array
    return own


# -- measuring ---------------------------------------------------------------------------------------


def places_of(names: list[str]) -> Places:
    """Where arrays can lie: the host and the first accelerator of each framework."""
    places: dict[str, tuple[str, Device]] = {}
    for name in names:
        first = {device.kind: device for device in reversed(arraybridge.framework(name).devices.available())}
        host = [first.pop("cpu")] if "cpu" in first else []
        devices = [*host, *first.values()][: len(host) + 1]
        places |= {f"{name} {one}" if len(devices) > 1 else name: (name, one) for one in devices}
    return places


def measure(places: Places, array: np.ndarray, bar: Progress) -> tuple[list[Json], list[Json]]:
    """Convert between every two places, and from an array as NumPy allocates it; a dictionary a pair."""
    cells: list[Json] = []
    for source, (framework, device) in bar.track(places.items(), description="converting"):
        make = partial(arraybridge.convert_memory, array, framework, device=device, copy=True)
        cells += _row(source, make, places, array)
    frameworks = [arraybridge.framework(framework) for framework, _ in places.values()]
    has_numpy = any(framework.devices.has_only_host for framework in frameworks)
    if len(places) == 1 or not has_numpy:
        return cells, []
    return cells, _row(OWN, partial(_as_numpy_allocates, array), places, array)


def _row(source: str, make: Callable[[], Any], places: Places, array: np.ndarray) -> list[Json]:
    """What becomes of an array that ``make`` places in the source, in each place."""
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
    # Without a device where that leads to the same place: the way in which most programs call it.
    options: Json = {} if route.device == device else {"device": device}
    if options:
        route = arraybridge.explain(x, framework, **options)
    convert = partial(arraybridge.convert_memory, x, framework, **options)
    result = arraybridge.to_numpy(convert())
    exact = result.dtype == array.dtype and result.shape == array.shape
    exact = exact and np.ascontiguousarray(result).tobytes() == array.tobytes()
    seconds = output.timer(convert)(_ROUNDS)
    # What is shared is not moved, so that it has no rate.
    rate = None if route.shares_memory or not seconds else route.nbytes / seconds
    measured = {"seconds": seconds, "bytes_per_second": rate, "exact": exact}
    return route.to_dict() | measured | {"kind": _kind(route), "error": None}


def _kind(route: arraybridge.Route) -> str:
    if route.method == "same":
        return "same"
    return "shared" if route.shares_memory else "copied"


# -- telling -----------------------------------------------------------------------------------------


def _all(result: Json) -> list[Json]:
    return [*result["cells"], *result["numpy_own"]]


def _title(result: Json) -> str:
    shape = " × ".join(map(str, result["shape"]))
    return f"{result['dtype']}, {shape} ({format_bytes(result['nbytes'])}), from the left to the top"


def _kinds(result: Json) -> list[str]:
    return [kind for kind in _MEANINGS if any(cell["kind"] == kind for cell in _all(result))]


def _grid(result: Json, words: Callable[[Json], T]) -> list[tuple[str | T, ...]]:
    """The rows of the table, each beginning with its source."""
    count = len(result["places"])
    sources = [*result["places"], *([OWN] if result["numpy_own"] else [])]
    cells = [words(cell) for cell in _all(result)]
    return [(source, *cells[i * count : (i + 1) * count]) for i, source in enumerate(sources)]


def _remarks(result: Json) -> list[str]:
    """What stands below the table, as plain words."""
    remarks = [
        f"{cell['source']} → {cell['target']}: the result differs; please report this."
        for cell in _all(result)
        if cell["exact"] is False
    ]
    if not remarks:
        done = sum(cell["exact"] is True for cell in result["cells"])
        remarks.append(f"All {done} results are exact, bit for bit.")
    if result["numpy_own"]:
        remarks.append(
            f"{OWN}: an array as NumPy allocates it, aligned to 16 bytes; those above it are aligned to 64,"
            " as arraybridge.aligned() makes them."
        )
    refusals = dict.fromkeys(cell["error"] for cell in _all(result) if cell["error"])
    remarks += [f"refused: {refusal}" for refusal in refusals]
    return remarks + [f"{name} left out: {reason}" for name, reason in result["missing"].items()]


def _print(result: Json) -> None:
    console = output.console()
    console.print(f"{_title(result)}\n")
    output.show(console, ("", *result["places"]), _grid(result, _cell_text))
    meanings = (f"[{_STYLES[kind]}]{kind}[/] {_MEANINGS[kind]}" for kind in _kinds(result))
    console.print("   ".join(meanings))
    for remark in _remarks(result):
        console.print(escape(remark))


def _cell_text(cell: Json) -> str:
    method = "" if cell["kind"] in ("same", "refused") else f" [dim]{cell['method']}[/]"
    figures = (format_seconds(cell["seconds"]), _format_rate(cell["bytes_per_second"]))
    return "\n".join([f"[{_STYLES[cell['kind']]}]{cell['kind']}[/]{method}", *filter(None, figures), ""])


def _format_rate(bytes_per_second: float | None) -> str:
    """``"4.2 GB/s"``: how fast bytes move, in decimal units, as data sheets count; nothing for None."""
    if bytes_per_second is None:
        return ""
    unit, name = (1e9, "GB/s") if bytes_per_second >= 1e8 else (1e6, "MB/s")
    return f"{bytes_per_second / unit:.1f} {name}"


# -- page and picture --------------------------------------------------------------------------------

_COLUMNS = ("pair", "memory", "method", "time", "rate", "where", "why")


def document(result: Json) -> str:
    """The page that ``--html`` writes."""
    head = ("from \\ to", *result["places"])
    grid = html_table(head, _grid(result, _grid_cell))
    about = f"{_title(result)}. arraybridge {result['arraybridge']} on {result['machine']}."
    return page(
        "Conversions on this machine",
        f"<p>{escape_html(about)}</p>",
        f"<p>{' '.join(f'{_tag(kind)} {_MEANINGS[kind]}.' for kind in _kinds(result))}</p>",
        f'<div class="wide grid">{grid}</div>',
        *(f"<p>{escape_html(remark)}</p>" for remark in _remarks(result)),
        "<h2>Every pair</h2>",
        sortable_table(_COLUMNS, [_pair(cell) for cell in _all(result)], ("time", "rate")),
    )


def _grid_cell(cell: Json) -> Cell:
    attributes = f'class="{cell["kind"]}" title="{escape_html(cell["reason"] or cell["error"] or "")}"'
    method = "" if cell["kind"] in ("same", "refused") else f" <small>{cell['method']}</small>"
    return f"{cell['kind']}{method}<br>{format_seconds(cell['seconds'])}", attributes


def _pair(cell: Json) -> list[Cell]:
    rate = cell["bytes_per_second"]
    seconds = cell["seconds"]
    copies = f" ({cell['copies']} copies)" if (cell["copies"] or 0) > 1 else ""
    # What has no number comes after everything that has one.
    return [
        f"{cell['source']} → {cell['target']}",
        (_tag(cell["kind"], cell["kind"] + copies), ""),
        cell["method"] or "",
        (format_seconds(seconds), f'class="number" data-value="{seconds or 1e9:.6g}"'),
        (_format_rate(rate), f'class="number" data-value="{rate or -1:.6g}"'),
        cell["device"] or "",
        cell["reason"] or cell["error"] or "",
    ]


def _tag(kind: str, words: str = "") -> str:
    """A word on the colour of its kind: ``shared``, ``copied``, ``same`` or ``refused``; HTML."""
    return f'<span class="tag {kind}">{words or kind}</span>'


def sortable_table(columns: Sequence[str], rows: Sequence[Sequence[Cell]], numbers: Sequence[str]) -> str:
    """A table that sorts by a click, and on a phone becomes a list of blocks; one for each page.

    Args:
        columns: the headings; on a phone the first one and the last one have lines of their own.
        rows: a cell for each column; those of ``numbers`` have the attribute ``data-value``.
        numbers: the columns that sort by number, either way.
    """
    heads = [(f"<button>{name}</button>", 'scope="col" aria-sort="none"') for name in columns]
    choices = "".join(
        f'<option value="{column} {way}">{name}{", largest first" if way == "down" else ""}</option>'
        for column, name in enumerate(columns)
        for way in (("up", "down") if name in numbers else ("up",))
    )
    return (
        f'<p class="sorters"><label>Sort by <select id="sorter">{choices}</select></label></p>\n'
        f'<div class="wide" id="sortable">{html_table(heads, rows)}</div>'
    )


def _heat_map(result: Json, path: Path) -> None:
    """The times as colours on a logarithmic scale, with how each pair travels written in."""
    labels = result["places"]
    count = len(labels)
    logs = np.array([math.log10(cell["seconds"] or math.nan) for cell in result["cells"]])
    # At least a decade, so that times which hardly differ don't get opposite colours.
    low = float(np.nanmin(logs, initial=0.0))
    high = max(float(np.nanmax(logs, initial=low)), low + 1)
    colours = importlib.import_module("matplotlib").colormaps["YlOrRd"].with_extremes(bad="#d9d9d9")
    with picture(2.6 + 1.25 * count, 1.9 + 0.95 * count, path) as (drawing, axes):
        image = axes.imshow(logs.reshape(count, count), cmap=colours, vmin=low, vmax=high, aspect="auto")
        for i, cell in enumerate(result["cells"]):
            lines = [cell["kind"], cell["method"] or "", format_seconds(cell["seconds"])]
            words = "\n".join(filter(None, lines[:1] + lines[1 + (cell["kind"] == "same") :]))
            color = "white" if (logs[i] - low) / (high - low) > 0.62 else "black"
            axes.text(i % count, i // count, words, ha="center", va="center", fontsize=8, color=color)
        axes.set_xticks(range(count), labels, rotation=0 if count < 8 else 30)
        axes.set_yticks(range(count), labels)
        axes.xaxis.tick_top()
        axes.set(xlabel="to", ylabel="from")
        axes.xaxis.set_label_position("top")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        bar = drawing.colorbar(image, ax=axes, shrink=0.8, label="time a conversion")
        bar.set_ticks(range(math.ceil(low), math.floor(high) + 1))
        bar.set_ticklabels([format_seconds(10.0**tick) for tick in bar.get_ticks()])
        drawing.suptitle(f"{result['dtype']}, {format_bytes(result['nbytes'])}", fontsize=11)
