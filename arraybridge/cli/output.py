"""Helpers that the commands share: consoles, tables, JSON output and progress bars.

Results go to stdout, progress and remarks to stderr. With ``--json``, stdout contains only JSON.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.cells import cell_len
from rich.console import Console, JustifyMethod, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

import arraybridge
from arraybridge.errors import MemoryConversionError
from arraybridge.interface import registry

#: Options that several commands have.
AsJson = Annotated[bool, typer.Option("--json", help="Print only JSON.")]
Frameworks = Annotated[
    str | None,
    typer.Option(help="Use only these, such as torch,jax. Default: all that are installed.", metavar="NAMES"),
]

_ROUND = 2e-3  # seconds: long enough for the clock's resolution, short enough to avoid most interruptions
_UNLIMITED = 1_000_000  # columns


# -- console and tables ------------------------------------------------------------------------------


def console(stderr: bool = False) -> Console:
    """Return a console. Pipes get lines of any length unless COLUMNS sets a width."""
    to = Console(stderr=stderr, highlight=False)
    if not to.is_terminal and not os.environ.get("COLUMNS"):
        to.width = _UNLIMITED
    return to


def join_lines(text: str) -> str:
    """Join the lines of each paragraph, so that the help can wrap them at any width."""
    blocks = re.split(r"\n\s*\n|(?<=:)\n", inspect.cleandoc(text))  # a heading ends in a colon
    return "\n\n".join(" ".join(block.split("\n")) for block in blocks)


def fits(
    to: Console, columns: Sequence[str], rows: Sequence[Sequence[str]], *, wrap: str | None = None
) -> bool:
    """Return whether a table fits the console, with its wrapped column as narrow as its longest word.

    rich cannot compute this, because it allows any column to be as narrow as its longest word.
    """
    total = 2 * (len(columns) - 1)  # two spaces between columns
    for column, *cells in zip(columns, *rows, strict=True):
        texts = [column, *(Text.from_markup(cell).plain for cell in cells)]
        separator = None if column == wrap else "\n"
        total += max((cell_len(part) for text in texts for part in text.split(separator)), default=0)
    return total <= to.width


def table_or_list(
    to: Console,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[str] = (),
    wrap: str | None = None,
) -> RenderableType:
    """Return a table if it fits the console, otherwise a list with one block of lines per row.

    Args:
        to: The console.
        columns: The headings.
        rows: One cell per column, in Rich markup.
        right: The headings of right-aligned columns.
        wrap: The heading of the column whose cells may be wrapped at spaces to make the table fit.
    """
    if fits(to, columns, rows, wrap=wrap):
        drawn = Table(box=None, pad_edge=False)
        for column in columns:
            justify: JustifyMethod = "right" if column in right else "left"
            drawn.add_column(column, justify=justify, no_wrap=column != wrap)
        for row in rows:
            drawn.add_row(*row)
        return drawn
    label = max(map(len, columns[1:]))
    lines: list[str] = []
    for title, *cells in rows:
        lines.append(title)
        for name, cell in zip(columns[1:], cells, strict=True):
            if cell:
                lines.append(f"  [bold]{name:{label}}[/]  {' '.join(cell.split())}")
    return Text.from_markup("\n".join(lines))


def print_skipped(to: Console, reasons: Mapping[str, str]) -> None:
    """Print which frameworks were skipped, and why."""
    for name, reason in reasons.items():
        to.print(f"[yellow]Skipped {name}:[/yellow] {escape(reason)}")


# -- JSON and progress -------------------------------------------------------------------------------


def print_json(document: Any, *, one_line: bool = False) -> None:
    """Print a JSON document on stdout."""
    typer.echo(json.dumps(document, indent=None if one_line else 2, ensure_ascii=False, allow_nan=False))


@contextlib.contextmanager
def _redirect(descriptor: int, target: int) -> Iterator[None]:
    """Redirect a file descriptor to another one, including the output from C++ code."""
    stream = sys.stdout if descriptor == 1 else sys.stderr
    stream.flush()
    original = os.dup(descriptor)
    os.dup2(target, descriptor)
    try:
        yield
    finally:
        stream.flush()
        os.dup2(original, descriptor)
        os.close(original)


def reserve_stdout(for_json: bool) -> contextlib.AbstractContextManager[None]:
    """Return a context manager that redirects stdout to stderr if ``for_json`` is true."""
    return _redirect(1, 2) if for_json else contextlib.nullcontext()


def progress_bar(*, has_total: bool = True) -> Progress:
    """Return a progress bar on stderr that appears only on terminals and disappears at the end.

    Without a total, it is a spinner.
    """
    to = console(stderr=True)
    to.quiet = not to.is_terminal  # rich 13.0 prints a newline even for a disabled bar, Textualize/rich#3905
    text = TextColumn("{task.description}")
    if has_total:
        columns = (text, BarColumn(bar_width=20), MofNCompleteColumn())
        return Progress(*columns, console=to, transient=True, disable=not to.is_terminal)
    return Progress(SpinnerColumn(), text, console=to, transient=True, disable=not to.is_terminal)


# -- frameworks and timing ---------------------------------------------------------------------------


def usable_frameworks(names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Convert one array to each framework; return the frameworks that work, and why the others do not."""
    reasons: dict[str, str] = {}
    early = [name for name in names if registry.metadata_of(name).loads_first]
    for name in dict.fromkeys((*early, *names)):
        try:
            # TensorFlow's C++ code writes to stderr during the import, regardless of its settings.
            with Path(os.devnull).open("w") as null, _redirect(2, null.fileno()):
                arraybridge.convert_memory(np.zeros((2, 2), np.float32), name, copy=True)
        except MemoryConversionError as error:
            reasons[name] = str(error)
    return [name for name in names if name not in reasons], reasons


def module_of_framework(name: str) -> Any:
    """Return the module of a framework that is already imported."""
    return next(sys.modules[one] for one in registry.metadata_of(name).packages if one in sys.modules)


def median_seconds(call: Callable[[], object], rounds: int) -> float:
    """Time a call in a number of rounds and return the median in seconds.

    Each round repeats a fast call until the clock can resolve it.
    """
    count = max(1, int(_ROUND / arraybridge.benchmark(call, runs=3).minimum))

    def batch() -> object:
        for _ in range(count - 1):
            call()
        return call()

    return arraybridge.benchmark(batch, warmup=0, runs=rounds).median / count
