"""``arraybridge bench --sizes``: functions on CPU and GPU, and the size from which on the GPU pays."""

from __future__ import annotations

import importlib
import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape

import arraybridge
from arraybridge.cli import output
from arraybridge.measure.compare import STANDARD, SizeComparison, SizeRow, compare

__all__ = ["bench_sizes"]

Json = dict[str, Any]
FORMAT = "arraybridge-bench-sizes-1"
_ITEMSIZE = 4  # float32
_COPIES = 8  # the array, what a function makes of it on its way, and its result, complex for an FFT


def bench_sizes(
    sizes: str, functions: str | None, rounds: int, as_json: bool, out: Path | None, plot: Path | None
) -> None:
    """Compare the functions at each size, and print, write and draw what came out."""
    counts = elements(sizes)
    chosen = named_functions(functions)
    output.check_fits(max(counts) * _ITEMSIZE, _COPIES, "--sizes")
    output.writable(out, "--out")
    output.plot_file(plot, "--plot")
    rows: list[SizeRow] = []
    with output.stdout_is_for_json(as_json), output.progress() as bar:
        task = bar.add_task("timing", total=len(chosen) * len(counts))
        for name, fn in chosen.items():
            for count in counts:
                bar.update(task, description=f"{name}, {count} elements")
                rows += _timed(name, fn, count, rounds)
                bar.advance(task)
    found = SizeComparison(tuple(rows))
    result = _document(found, rounds)
    if out is not None:
        with output.rewrite(out, "--out"):
            out.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if plot is not None:
        with output.rewrite(plot, "--plot"):
            found.plot(plot)
    if as_json:
        output.print_json(result)
    else:
        output.console().print(f"float32, medians of {rounds} rounds\n\n{escape(str(found))}", soft_wrap=True)


def _timed(name: str, fn: Callable[[Any], Any], count: int, rounds: int) -> tuple[SizeRow, ...]:
    try:
        return compare({name: fn}, sizes=[count], runs=rounds).rows
    except Exception as error:  # whatever a function of the user's raises is reported
        reason = f"{name} fails at {count} elements: {type(error).__name__}: {error}"
        typer.echo(f"{reason}\nIt is called with one array of float32, 1-D.", err=True)
        raise typer.Exit(1) from error


def _document(found: SizeComparison, rounds: int) -> Json:
    return {
        "format": FORMAT,
        "arraybridge": arraybridge.__version__,
        "python": platform.python_version(),
        "machine": {"system": f"{platform.system()} {platform.machine()}", "cores": os.cpu_count()},
        "rounds": rounds,
        "note": found.rows[0].comparison.note,
        "rows": found.as_dicts(),
        "crossover": {name: found.crossover(name) for name in found.names()},
    }


# -- options -----------------------------------------------------------------------------------------


def elements(words: str) -> list[int]:
    """``"1000,1e6,4MiB"`` as numbers of elements, each once and in order; a size in bytes is of float32.

    Raises:
        typer.BadParameter: one is no size.

    >>> elements("1e3, 64KiB,1_000")
    [1000, 16384]
    """
    counts = set()
    for word in filter(None, (word.strip() for word in words.split(","))):
        try:
            count = float(word)
        except ValueError:
            count = output.size_in_bytes(word) / _ITEMSIZE
        if not 1 <= count < 1e15:  # also refuses nan
            raise typer.BadParameter(f"{word!r} is no number of elements", param_hint="--sizes")
        counts.add(int(count))
    if not counts:
        raise typer.BadParameter("names no size; write it like 1000,100000,4MiB", param_hint="--sizes")
    return sorted(counts)


def named_functions(words: str | None) -> dict[str, Callable[[Any], Any]]:
    """The functions of ``--functions fft,numpy:sort``: of the standard set, or ``MODULE:NAME``.

    Raises:
        typer.BadParameter: one is not known, or can't be imported.
    """
    if words is None:
        return dict(STANDARD)
    chosen: dict[str, Callable[[Any], Any]] = {}
    for word in filter(None, (word.strip() for word in words.split(","))):
        chosen[word] = STANDARD[word] if word in STANDARD else _imported(word)
    if not chosen:
        raise typer.BadParameter(f"names none; there are {_known()}", param_hint="--functions")
    return chosen


def _known() -> str:
    return f"{', '.join(STANDARD)}, or one of your own as MODULE:NAME"


def _imported(word: str) -> Callable[[Any], Any]:
    module, _, name = word.partition(":")
    if not module or not name:
        raise typer.BadParameter(f"{word!r} is not known; there are {_known()}", param_hint="--functions")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # a module beside the user, also where a script runs this
    try:
        found: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise typer.BadParameter(f"{word!r} can't be had: {error}", param_hint="--functions") from None
    if not callable(found):
        raise typer.BadParameter(f"{word!r} is no function", param_hint="--functions")
    function: Callable[[Any], Any] = found
    return function
