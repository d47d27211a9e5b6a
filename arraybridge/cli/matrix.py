"""``arraybridge matrix``: every pair of frameworks on this machine, converted and measured."""

from __future__ import annotations

import importlib
import math
import platform
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.text import Text

import arraybridge
from arraybridge.cli import output
from arraybridge.cli.matrix_page import page
from arraybridge.errors import DtypeNotSupportedError, MemoryConversionError
from arraybridge.frameworks import hostmemory
from arraybridge.show import format_bytes, format_rate, format_seconds
from arraybridge.types import Device

__all__ = ["matrix"]

Json = dict[str, Any]
_STYLES = {"same": "dim", "shared": "green", "copied": "yellow", "refused": "red"}
#: The label of arrays in memory that NumPy itself allocated; those of the other rows are aligned to 64 bytes.
OWN = "numpy's own"
_BUDGET = 0.1  # seconds of timing a pair
_MIN_CALLS, _MAX_CALLS = 3, 50


@dataclass(frozen=True)
class Place:
    """A framework, and a device of it where it has several that matter."""

    framework: str
    device: Device
    label: str


def matrix(
    size: Annotated[str, typer.Option(help="Bytes of the array that is converted: 4MiB, 64KiB.")] = "4MiB",
    dtype: Annotated[str, typer.Option(help="Its dtype, as NumPy names it.")] = "float32",
    frameworks: Annotated[
        str | None,
        typer.Option(
            help="Only these, e.g. torch,jax; otherwise all that are installed.", show_default=False
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page of its own, for any browser.", show_default=False)
    ] = None,
    png: Annotated[
        Path | None, typer.Option(help="Draw a heat map of the times. Needs matplotlib.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print machine-readable JSON alone.")] = False,
) -> None:
    """Convert an array between all frameworks of this machine, and show how each pair travels.

    Each cell says whether memory is shared or copied, by which method, and how long it took; every result is
    compared with the original, bit for bit. The exit code is 1 when one differs.

    Examples:
    [bold]arraybridge matrix[/bold]

    [bold]arraybridge matrix --size 64MiB --dtype uint16 --frameworks numpy,torch[/bold]

    [bold]arraybridge matrix --html matrix.html --png matrix.png[/bold]
    """
    nbytes = output.size_in_bytes(size)
    output.check_fits(nbytes, 6)
    array = _array(nbytes, dtype)
    output.writable(html, "--html")
    output.plot_file(png, "--png")
    names = output.chosen_frameworks(frameworks)
    with output.stdout_is_for_json(as_json):
        places, missing = find_places(names)
        with output.progress() as bar:
            cells = measure(places, array, bar)
            own = measure_own(places, array)
    result: Json = {
        "arraybridge": arraybridge.__version__,
        "machine": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "dtype": array.dtype.name,
        "shape": list(array.shape),
        "nbytes": array.nbytes,
        "places": [place.label for place in places],
        "cells": cells,
        "numpy_own": own,
        "missing": missing,
    }
    if html is not None:
        with output.rewrite(html, "--html"):
            html.write_text(page(result), encoding="utf-8")
    if png is not None:
        with output.rewrite(png, "--png"):
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
        dtype = hostmemory.np_dtype(name)  # also bfloat16 and the float8 types, where ml_dtypes is installed
    except (TypeError, AttributeError, DtypeNotSupportedError):
        raise typer.BadParameter(
            f"{name!r} is no dtype that NumPy has here; write it like float32, uint8 or complex64"
            " (bfloat16 and float8 need pip install ml-dtypes)",
            param_hint="--dtype",
        ) from None
    if dtype.kind not in "biufcV" or dtype.names or not dtype.itemsize:
        raise typer.BadParameter(f"{name} is no dtype of numbers", param_hint="--dtype")
    count = max(1, nbytes // dtype.itemsize)
    shape = (count // 1024, 1024) if count % 1024 == 0 else (count,)
    # Small numbers, which every dtype has.
    values = np.resize(np.arange(100, dtype=np.uint8), count)
    plain = (values % 2).astype(dtype) if dtype.kind == "b" else values.astype(dtype)
    # copy=True places it in aligned memory.
    return arraybridge.to_numpy(plain.reshape(shape), copy=True)


# -- measuring ---------------------------------------------------------------------------------------


def find_places(names: list[str]) -> tuple[list[Place], Json]:
    """Where arrays can lie: the host and the first accelerator of each framework; and what is left out."""
    found: dict[str, list[Device]] = {}
    missing: Json = {}
    probe = np.zeros((2, 2), np.float32)
    for name in output.safest_first(names):
        try:
            with output.quiet():
                arraybridge.convert_memory(probe, name)
                devices = arraybridge.framework(name).devices()
        except MemoryConversionError as error:
            missing[name] = str(error)
            continue
        kinds = {device.kind: device for device in reversed(devices)}
        hosts = [kinds["cpu"]] if "cpu" in kinds else []
        found[name] = hosts + [device for kind, device in kinds.items() if kind != "cpu"][:1]
    places = []
    for name in names:
        several = len(found.get(name, ())) > 1
        places += [Place(name, d, f"{name} {d}" if several else name) for d in found.get(name, ())]
    return places, missing


def measure(places: list[Place], array: np.ndarray, bar: Progress) -> list[Json]:
    """Convert between every two places; one dictionary a pair, row by row."""
    task = bar.add_task("converting", total=len(places) ** 2)
    cells = []
    for source in places:
        try:
            x = _put(array, source)
            refusal = None
        except MemoryConversionError as error:
            x, refusal = None, str(error)
        for target in places:
            bar.update(task, description=f"{source.label} → {target.label}")
            cell = _blank(source, target, array.nbytes)
            if refusal is None:
                try:
                    cell |= _convert(x, target, array)
                except MemoryConversionError as error:
                    cell["error"] = str(error)
            else:
                cell["error"] = refusal
            cells.append(cell)
            bar.advance(task)
    return cells


def measure_own(places: list[Place], array: np.ndarray) -> list[Json]:
    """The row of an array as NumPy allocates it, which not every framework can share."""
    names = {place.framework for place in places}
    if "numpy" not in names or len(names) == 1:
        return []
    source = Place("numpy", Device("cpu"), OWN)
    x = output.as_numpy_allocates(array)
    cells = []
    for target in places:
        cell = _blank(source, target, array.nbytes)
        try:
            cell |= _convert(x, target, array)
        except MemoryConversionError as error:
            cell["error"] = str(error)
        cells.append(cell)
    return cells


def _put(array: np.ndarray, place: Place) -> Any:
    """The array in a framework, in memory of that framework's own, on a device."""
    if arraybridge.framework(place.framework).has_host or place.device.kind != "opencl":
        return arraybridge.convert_memory(array, place.framework, device=place.device, copy=True)
    return arraybridge.convert_memory(array, place.framework, gpu_id=place.device.index, copy=True)


def _blank(source: Place, target: Place, nbytes: int) -> Json:
    return {
        "source": source.label,
        "target": target.label,
        "kind": "refused",
        "method": None,
        "device": None,
        "shares_memory": None,
        "copies": None,
        "nbytes": nbytes,
        "seconds": None,
        "bytes_per_second": None,
        "exact": None,
        "reason": None,
        "error": None,
    }


def _convert(x: Any, target: Place, array: np.ndarray) -> Json:
    route = arraybridge.explain(x, target.framework)
    # Without a device where that leads to the same place: the way in which most programs call it.
    options: Json = {} if route.device == target.device else {"device": target.device}
    if options:
        route = arraybridge.explain(x, target.framework, **options)
    convert, name = arraybridge.convert_memory, target.framework
    result = convert(x, name, **options)
    exact = _same_bits(arraybridge.to_numpy(result), array)
    del result
    taken: list[float] = []
    started = time.perf_counter()
    while len(taken) < _MIN_CALLS or (len(taken) < _MAX_CALLS and time.perf_counter() - started < _BUDGET):
        before = time.perf_counter()
        convert(x, name, **options)
        taken.append(time.perf_counter() - before)
    spent = statistics.median(taken)
    kind = "same" if route.method == "same" else "shared" if route.shares_memory else "copied"
    return {
        "kind": kind,
        "method": route.method,
        "device": str(route.device),
        "shares_memory": route.shares_memory,
        "copies": route.copies,
        "seconds": spent,
        # What is shared is not moved, so that it has no rate.
        "bytes_per_second": None if route.shares_memory or not spent else route.nbytes / spent,
        "exact": exact,
        "reason": route.reason,
    }


def _same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    same = one.dtype == other.dtype and one.shape == other.shape
    return same and np.ascontiguousarray(one).tobytes() == other.tobytes()


# -- telling -----------------------------------------------------------------------------------------


def _all(result: Json) -> list[Json]:
    return [*result["cells"], *result["numpy_own"]]


def _print(result: Json) -> None:
    console = output.console()
    shape = " × ".join(map(str, result["shape"]))
    console.print(
        f"{result['dtype']}, {shape} ({format_bytes(result['nbytes'])}), from the left to the top\n"
    )
    grid = _grid(result)
    if max(Text.from_markup(line).cell_len for line in grid.split("\n")) <= console.width:
        console.print(grid)
    else:
        _print_list(console, result)
    legend = Text("\n")
    for kind, meaning in (
        ("shared", "the same memory"),
        ("copied", "the bytes are copied"),
        ("same", "the very object"),
        ("refused", "see below"),
    ):
        if any(cell["kind"] == kind for cell in _all(result)):
            legend.append(kind, style=_STYLES[kind]).append(f" {meaning}   ")
    console.print(legend)
    if result["numpy_own"]:
        console.print(
            f"{OWN}: an array as NumPy allocates it, aligned to 16 bytes; those above it are aligned to 64,"
            " as arraybridge.aligned() makes them."
        )
    wrong = [cell for cell in _all(result) if cell["exact"] is False]
    for cell in wrong:
        console.print(
            f"[red]{cell['source']} → {cell['target']}: the result differs; please report this.[/red]"
        )
    if not wrong:
        done = sum(cell["exact"] is True for cell in result["cells"])
        console.print(f"All {done} results are exact, bit for bit.")
    for refusal in dict.fromkeys(cell["error"] for cell in _all(result) if cell["error"]):
        console.print(f"[red]refused:[/red] {escape(refusal)}")
    for name, reason in result["missing"].items():
        console.print(f"[yellow]{name} left out:[/yellow] {escape(reason)}")


def _grid(result: Json) -> str:
    """Rows and columns as in the table of conversions, each cell of three lines."""
    cells = iter(_all(result))
    labels = result["places"]
    sources = [*labels, *([OWN] if result["numpy_own"] else [])]
    rows = [(f"[bold]{source}[/bold]", *(_cell_text(next(cells)) for _ in labels)) for source in sources]
    return output.table(("", *labels), rows, (), None)


def _cell_text(cell: Json) -> str:
    lines = [output.coloured(cell["kind"], _STYLES[cell["kind"]])]
    if cell["kind"] not in ("same", "refused"):
        lines[0] += " " + output.coloured(cell["method"], "" if output.no_colour() else "dim")
    lines += [format_seconds(cell["seconds"]), format_rate(cell["bytes_per_second"])]
    return "\n".join([*filter(None, lines), ""])


def _print_list(console: Console, result: Json) -> None:
    rows = [
        (
            f"{cell['source']} → {cell['target']}",
            output.coloured(cell["kind"], _STYLES[cell["kind"]]),
            cell["method"] or "",
            format_seconds(cell["seconds"]),
            format_rate(cell["bytes_per_second"]),
        )
        for cell in _all(result)
        if cell["kind"] != "same"
    ]
    output.show(console, ("pair", "memory", "method", "time", "rate"), rows, ("time", "rate"))


def _heat_map(result: Json, path: Path) -> None:
    """The times as colours on a logarithmic scale, with how each pair travels written in."""
    figures = importlib.import_module("matplotlib.figure")
    ticks = importlib.import_module("matplotlib.ticker")
    labels = result["places"]
    count = len(labels)
    if not count:
        raise typer.BadParameter("there is nothing to draw: no framework could be used", param_hint="--png")
    times = np.array([math.nan if c["seconds"] is None else c["seconds"] * 1e6 for c in result["cells"]])
    logs = np.log10(times).reshape(count, count)
    figure = figures.Figure(figsize=(2.6 + 1.25 * count, 1.9 + 0.95 * count), layout="constrained")
    panel = figure.subplots()
    colours = importlib.import_module("matplotlib").colormaps["YlOrRd"].with_extremes(bad="#d9d9d9")
    # At least a decade, so that times which hardly differ don't get opposite colours.
    known = logs[np.isfinite(logs)]
    low, high = (known.min(), known.max()) if known.size else (0.0, 1.0)
    high = max(high, low + 1)
    image = panel.imshow(logs, cmap=colours, vmin=low, vmax=high, aspect="auto")
    for index, cell in enumerate(result["cells"]):
        row, column = divmod(index, count)
        if cell["kind"] == "refused":
            words = "refused"
        else:
            how = "same object" if cell["kind"] == "same" else f"{cell['kind']}\n{cell['method']}"
            words = f"{how}\n{format_seconds(cell['seconds'])}"
        dark = np.isfinite(logs[row, column]) and (logs[row, column] - low) / (high - low) > 0.62
        panel.text(
            column, row, words, ha="center", va="center", fontsize=8, color="white" if dark else "black"
        )
    panel.set_xticks(range(count), labels, rotation=0 if count < 8 else 30)
    panel.set_yticks(range(count), labels)
    panel.xaxis.tick_top()
    panel.set_xlabel("to")
    panel.xaxis.set_label_position("top")
    panel.set_ylabel("from")
    panel.set_xticks(np.arange(-0.5, count), minor=True)
    panel.set_yticks(np.arange(-0.5, count), minor=True)
    panel.grid(which="minor", color="white", linewidth=2)
    panel.tick_params(which="both", length=0)
    panel.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=panel, shrink=0.8)
    bar.ax.yaxis.set_major_locator(ticks.MaxNLocator(integer=True))
    bar.ax.yaxis.set_major_formatter(ticks.FuncFormatter(lambda log, _: format_seconds(10**log / 1e6)))
    bar.set_label("time a conversion")
    figure.suptitle(f"{result['dtype']}, {format_bytes(result['nbytes'])}", fontsize=11)
    figure.savefig(path, dpi=140)
