"""``arraybridge matrix``: convert between all frameworks on this machine, and time each conversion."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.progress import Progress

import arraybridge
from arraybridge.cli import option_parsing, output
from arraybridge.cli.matrix_report import UNALIGNED, html_page, plot_times, print_result
from arraybridge.device import Device
from arraybridge.errors import DtypeNotSupportedError, MemoryConversionError
from arraybridge.host import dtype_names
from arraybridge.interface.installation import can_find
from arraybridge.testing.conformance import copy_at_offset

if TYPE_CHECKING:
    from arraybridge.cli.matrix_report import Json

_ROUNDS = 9


#: Label of a row or column → the framework and its device.
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
    array = _make_array(option_parsing.parse_size(size), dtype)
    option_parsing.check_writable(html, "--html")
    option_parsing.check_writable(png, "--png", ".png", ".svg", ".pdf")
    if png is not None and not can_find("matplotlib"):
        raise typer.BadParameter(
            "The heat map requires matplotlib, which is not installed. Run pip install matplotlib.",
            param_hint="--png",
        )
    names = option_parsing.parse_frameworks(frameworks)
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
        plot_times(result, png)
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
    # Use small numbers, which every dtype can represent.
    values = np.resize(np.arange(100, dtype=np.uint8), count)
    plain = (values % 2).astype(dtype) if dtype.kind == "b" else values.astype(dtype)
    # copy=True returns aligned memory.
    return arraybridge.to_numpy(plain.reshape(shape), copy=True)


# -- measuring ---------------------------------------------------------------------------------------


def list_places(names: list[str]) -> Places:
    """List the host and the first accelerator of each framework, if the framework supports them."""
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
        One dictionary per pair, and one dictionary per place for the unaligned array.
    """
    cells: list[Json] = []
    for source, (framework, device) in bar.track(places.items(), description="Converting"):
        make = partial(arraybridge.convert_memory, array, framework, device=device, copy=True)
        cells += _measure_row(source, make, places, array)
    if len(places) == 1 or "numpy" not in places:
        return cells, []
    # NumPy aligns memory to 16 bytes. Small arrays are aligned to 64 bytes by chance; large ones never are.
    return cells, _measure_row(UNALIGNED, partial(copy_at_offset, array, 16), places, array)


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
    seconds = output.median_seconds(convert, _ROUNDS)
    # Shared memory is not moved, so there is no transfer rate.
    rate = None if route.shares_memory or not seconds else route.nbytes / seconds
    measured = {"seconds": seconds, "bytes_per_second": rate, "exact": exact}
    return route.to_dict() | measured | {"kind": _kind(route), "error": None}


def _kind(route: arraybridge.Route) -> str:
    if route.method == "same":
        return "same"
    return "shared" if route.shares_memory else "copied"
