"""``arraybridge bench``: time conversions and decorators against the frameworks' own functions."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from rich.markup import escape

import arraybridge
from arraybridge.benchmarking.native_calls import NATIVE_CALLS
from arraybridge.cli import option_parsing, output
from arraybridge.conversion.table import FRAMEWORKS
from arraybridge.errors import MemoryConversionError
from arraybridge.formatting import format_bytes, format_seconds
from arraybridge.interface.streams import identity

Json = dict[str, Any]
Call = Callable[[], object]

_CALLS = {(source, target): call for sources, target, call in NATIVE_CALLS for source in sources.split()}
#: (source, target) → the native call, in the order of the table.
RAW = {(x, y): _CALLS[x, y] for x in FRAMEWORKS for y in FRAMEWORKS if (x, y) in _CALLS}


class Case(NamedTuple):
    """Two calls that are timed against each other.

    Attributes:
        name: The conversion, ``"numpy → torch"``, or the decorator, ``"@torch"``.
        text: The names of the native functions.
        native: A function that calls the native functions.
        ours: A function that does the same work with arraybridge.
    """

    name: str
    text: str
    native: Call
    ours: Call


def bench(
    frameworks: output.Frameworks = None,
    size: Annotated[
        str, typer.Option(help="Size of the float32 array, such as 64KiB.", metavar="SIZE")
    ] = "4MiB",
    rounds: Annotated[
        int, typer.Option(help="Number of timings per call.", min=3, max=1000, metavar="N")
    ] = 15,
    as_json: output.AsJson = False,
) -> None:
    """Compare the speed of arraybridge with that of the frameworks' own functions.

    Conversions are compared with the fastest public functions that perform the same conversion.
    Calls to decorated functions are compared with calls to the undecorated functions.
    The calls alternate, so that other load on the machine affects both equally.

    Example:
    [bold]arraybridge bench --frameworks torch,jax[/bold]
    """
    nbytes = option_parsing.parse_size(size)
    names = option_parsing.parse_frameworks(frameworks)
    result: Json = {
        "arraybridge": arraybridge.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "rounds": rounds,
    }
    with output.reserve_stdout(as_json):
        cases, left_out = make_cases(names, nbytes)
        with output.progress_bar() as bar:
            result["rows"] = [_row(case, rounds) for case in bar.track(cases, description="Timing")]
    result |= {"nbytes": nbytes, "left_out": left_out}
    if as_json:
        output.print_json(result)
    else:
        print_result(result)


# -- conversions and decorators ----------------------------------------------------------------------


def make_cases(names: list[str], nbytes: int) -> tuple[list[Case], dict[str, str]]:
    """Return the cases for the frameworks that work here, and why the other frameworks do not."""
    host = np.arange(max(1, nbytes // 4), dtype=np.float32)
    available, left_out = output.usable_frameworks(names)
    arrays = {name: arraybridge.convert_memory(host, name, copy=True) for name in available}
    cases = []
    for source, target in RAW:
        if source in arrays and target in arrays:
            cases += _conversion(source, target, arrays)
    for name in available:
        # The function does nothing, so that the difference is the cost of the decorator.
        decorated = arraybridge.framework(name).decorator(identity)
        x = arrays[name]
        cases.append(Case(f"@{name}", "f", partial(identity, x), partial(decorated, x)))
    return cases, left_out


def _conversion(source: str, target: str, arrays: Mapping[str, Any]) -> list[Case]:
    """Return a list with the case for a pair; empty if the source cannot create the required GPU array."""
    x = arrays[source]
    has_host = arraybridge.framework(target).has_host
    if not has_host and not arraybridge.framework(source).devices.has_only_host:
        try:
            x = arraybridge.convert_memory(x, source, gpu_id=0)  # CuPy imports only GPU memory through DLPack
        except MemoryConversionError:
            return []
    native = RAW[source, target]
    raw = native.call(output.module_of_framework(source), output.module_of_framework(target))
    ours = partial(arraybridge.convert_memory, x, target)
    return [Case(f"{source} → {target}", native.text, partial(raw, x), ours)]


def _row(case: Case, rounds: int) -> Json:
    """Time both calls in three alternating turns, and return the medians of the turns in seconds."""
    calls = (case.native, case.ours)
    turns = [[output.median_seconds(call, -(-rounds // 3)) for call in calls] for _ in range(3)]
    raw, ours = (statistics.median(column) for column in zip(*turns, strict=True))
    return {"name": case.name, "raw_call": case.text, "raw": raw, "ours": ours, "difference": ours - raw}


def print_result(result: Json) -> None:
    """Print the table of conversions and decorators."""
    console = output.console()
    console.print(f"float32, {format_bytes(result['nbytes'])}. Medians of {result['rounds']} timings.\n")
    columns = ("conversion", "native functions", "native", "arraybridge", "overhead")
    rows = []
    for row in result["rows"]:
        times = (format_seconds(row[key]) for key in ("raw", "ours", "difference"))
        rows.append((row["name"], escape(row["raw_call"]), *times))
    console.print(output.table_or_list(console, columns, rows, right=columns[2:], wrap="native functions"))
    if any(row["name"].startswith("@") for row in result["rows"]):
        console.print("\n@name: a call to a decorated function f that does nothing.")
    if any(row["difference"] < 0 for row in result["rows"]):
        console.print("Negative overhead: arraybridge skips steps that the native functions repeat.")
    output.print_skipped(console, result["left_out"])
