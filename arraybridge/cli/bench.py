"""``arraybridge bench``: time conversions and decorators against the frameworks' own functions."""

from __future__ import annotations

import math
import os
import pkgutil
import platform
import statistics
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from rich.markup import escape

import arraybridge
from arraybridge import compare
from arraybridge.benchmarking.native_calls import NATIVE_CALLS
from arraybridge.benchmarking.standard_functions import STANDARD
from arraybridge.cli import option_parsing, output
from arraybridge.errors import MemoryConversionError
from arraybridge.formatting import format_bytes, format_seconds

Json = dict[str, Any]
Call = Callable[[], object]

_ITEMSIZE = 4  # float32


_ORDER = ("numpy", "torch", "jax", "tensorflow", "cupy", "pyclesperanto")
_CALLS = {(source, target): call for sources, target, call in NATIVE_CALLS for source in sources.split()}
#: (source, target) → the native call, in the order of the table.
RAW = {(x, y): _CALLS[x, y] for x in _ORDER for y in _ORDER if (x, y) in _CALLS}


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
    context: typer.Context,
    frameworks: output.Frameworks = None,
    size: Annotated[
        str, typer.Option(help="Size of the float32 array, such as 64KiB.", metavar="SIZE")
    ] = "4MiB",
    rounds: Annotated[
        int, typer.Option(help="Number of timings per call.", min=3, max=1000, metavar="N")
    ] = 15,
    as_json: output.AsJson = False,
    sizes: Annotated[
        str | None,
        typer.Option(help="Compare CPU and GPU at these sizes, such as 1000,1e6,64MiB.", metavar="SIZES"),
    ] = None,
    functions: Annotated[
        str | None,
        typer.Option(
            help=f"Functions for --sizes, such as fft,matmul or MODULE:NAME. Default: {', '.join(STANDARD)}.",
            metavar="NAMES",
        ),
    ] = None,
) -> None:
    """Compare the speed of arraybridge with that of the frameworks' own functions.

    Conversions are compared with the fastest public functions that perform the same conversion.
    Calls to decorated functions are compared with calls to the undecorated functions.
    The calls alternate, so that other load on the machine affects both equally.

    With --sizes, functions are timed on the CPU and on the GPU, without transfers.
    The table shows the size from which the GPU is faster.

    Examples:
    [bold]arraybridge bench --frameworks torch,jax[/bold]

    [bold]arraybridge bench --sizes 1e3,1e5,1e7 --functions fft,matmul[/bold]
    """
    _check_mode(context)
    result: Json = {
        "arraybridge": arraybridge.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "rounds": rounds,
    }
    if sizes is not None:
        _compare_sizes(parse_element_counts(sizes), parse_functions(functions), result, as_json)
        return
    nbytes = option_parsing.parse_size(size)
    names = option_parsing.parse_frameworks(frameworks)
    with output.reserve_stdout(as_json):
        cases, left_out = make_cases(names, nbytes)
        with output.progress_bar() as bar:
            result["rows"] = [_row(case, rounds) for case in bar.track(cases, description="Timing")]
    result |= {"nbytes": nbytes, "left_out": left_out}
    if as_json:
        output.print_json(result)
    else:
        print_result(result)


def _check_mode(context: typer.Context) -> None:
    """Raise for options that require ``--sizes`` if it is missing, and for options that it excludes."""
    with_sizes = context.params["sizes"] is not None
    if not with_sizes and context.params["functions"] is not None:
        raise typer.BadParameter(
            "It requires --sizes. Add sizes, such as --sizes 1000,1e6.", param_hint="--functions"
        )
    for name in ("size", "frameworks") if with_sizes else ():
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            raise typer.BadParameter(
                "It cannot be used with --sizes. Remove one of them.", param_hint=f"--{name}"
            )


def _compare_sizes(
    counts: list[int], functions: dict[str, Callable[[Any], Any]], result: Json, as_json: bool
) -> None:
    """Time functions on the CPU and on the GPU, and print the result."""
    with output.reserve_stdout(as_json):
        comparison = compare(functions, sizes=counts, runs=result["rounds"])
    result["rows"] = comparison.as_dicts()
    result["note"] = comparison.note
    result["crossover"] = {name: comparison.crossover(name) for name in comparison.names()}
    if as_json:
        output.print_json(result)
        return
    text = f"float32, median of {result['rounds']} timings\n\n{comparison}"
    output.console().print(escape(text), soft_wrap=True)


# -- conversions and decorators ----------------------------------------------------------------------


def make_cases(names: list[str], nbytes: int) -> tuple[list[Case], dict[str, str]]:
    """Return the cases for the frameworks that work here, and why the other frameworks do not."""
    host = np.arange(max(1, nbytes // _ITEMSIZE), dtype=np.float32)
    available, left_out = output.usable_frameworks(names)
    arrays = {name: arraybridge.convert_memory(host, name, copy=True) for name in available}
    cases = []
    for source, target in RAW:
        if source in arrays and target in arrays:
            cases += _conversion(source, target, arrays)
    for name in available:
        # The function does nothing, so that the difference is the cost of the decorator.
        decorated = arraybridge.framework(name).decorator(_nothing)
        calls = (partial(_nothing, arrays[name]), partial(decorated, arrays[name]))
        cases.append(Case(f"@{name}", "f", *calls))
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
    raw = native.call(output.imported_module(source), output.imported_module(target))
    ours = partial(arraybridge.convert_memory, x, target)
    return [Case(f"{source} → {target}", native.text, partial(raw, x), ours)]


def _nothing(x: Any) -> Any:
    return x


def _row(case: Case, rounds: int) -> Json:
    """Time both calls in three alternating turns, and return the medians of the turns in seconds."""
    timers = [output.make_timer(call) for call in (case.native, case.ours)]
    turns = [[timer(-(-rounds // 3)) for timer in timers] for _ in range(3)]
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


def parse_element_counts(text: str) -> list[int]:
    """Parse ``"1000,1e6,4MiB"`` and return sorted numbers of float32 elements."""
    counts = set()
    for item in option_parsing.split_list(text):
        count = _element_count(item)
        if not 1 <= count < 1e15:  # false for nan
            raise typer.BadParameter(
                f"{item!r} is not a number of elements. Use numbers such as 1000,1e6 or sizes such as 4MiB.",
                param_hint="--sizes",
            )
        counts.add(int(count))
    if not counts:
        raise typer.BadParameter("The list is empty. Use sizes such as 1000,1e6,4MiB.", param_hint="--sizes")
    return sorted(counts)


def _element_count(text: str) -> float:
    """Return the number of elements; nan if the text is neither a number nor a size."""
    with suppress(ValueError):
        return float(text)
    with suppress(typer.BadParameter):
        return option_parsing.parse_size(text) / _ITEMSIZE
    return math.nan


def parse_functions(text: str | None) -> dict[str, Callable[[Any], Any]]:
    """Return the functions in ``--functions fft,numpy:sort`` by name; by default the standard set."""
    names = list(STANDARD) if text is None else option_parsing.split_list(text)
    if not names:
        raise typer.BadParameter("The list is empty. Use names such as fft,matmul.", param_hint="--functions")
    return {name: STANDARD[name] if name in STANDARD else _import_function(name) for name in names}


def _import_function(name: str) -> Callable[[Any], Any]:
    """Import ``MODULE:NAME``. The module may be in the working directory."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        function: Callable[[Any], Any] = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise typer.BadParameter(
            f"Cannot import {name!r}: {error}. Use {', '.join(STANDARD)}, or pass a function as MODULE:NAME.",
            param_hint="--functions",
        ) from None
    if not callable(function):
        raise typer.BadParameter(
            f"{name!r} is of type {type(function).__name__}. Pass a function as MODULE:NAME.",
            param_hint="--functions",
        )
    return function
