"""What the commands share: where they print, in which form, and how a user's mistake is told.

Results go to stdout; progress and remarks go to stderr. With ``--json`` stdout holds JSON and nothing else.
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
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

import arraybridge
from arraybridge.errors import MemoryConversionError
from arraybridge.frameworks import registry

#: Options that several commands have.
AsJson = Annotated[bool, typer.Option("--json", help="Print machine-readable JSON alone.")]
Frameworks = Annotated[
    str | None,
    typer.Option(help="Only these, e.g. torch,jax; otherwise all that are installed."),
]

_ROUND = 2e-3  # seconds: long enough for the clock, short enough to miss most interruptions


def console(stderr: bool = False) -> Console:
    """A console; a pipe has no width, so that no line is broken there unless COLUMNS says how wide it is."""
    to = Console(stderr=stderr, highlight=False)
    if not to.is_terminal and not os.environ.get("COLUMNS"):
        to.width = 1_000_000
    return to


def paragraphs(words: str) -> str:
    """Words with the lines of each paragraph joined, for whoever breaks them anew at another width."""
    blocks = re.split(r"\n\s*\n|(?<=:)\n", inspect.cleandoc(words))  # a heading ends in a colon
    return "\n\n".join(" ".join(block.split("\n")) for block in blocks)


def show(
    to: Console, columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()
) -> None:
    """Print a table of cells in rich's markup; where it is too wide, each row as a block of lines."""
    to.print(table(to, columns, rows, right))


def table(
    to: Console, columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str]
) -> RenderableType:
    """What `show` prints."""
    drawn = Table(box=None, pad_edge=False)
    for column in columns:
        drawn.add_column(column, justify="right" if column in right else "left")
    for row in rows:
        drawn.add_row(*row)
    if to.measure(drawn, options=to.options.update(max_width=1_000_000)).maximum <= to.width:
        return drawn
    label = max(map(len, columns[1:]))
    lines: list[str] = []
    for title, *cells in rows:
        named = zip(columns[1:], cells, strict=True)
        lines += [
            title,
            *(f"  [bold]{name:{label}}[/]  {' '.join(cell.split())}" for name, cell in named if cell),
        ]
    return Text.from_markup("\n".join(lines))


def print_json(document: Any, *, one_line: bool = False) -> None:
    """Print a JSON document on stdout."""
    typer.echo(json.dumps(document, indent=None if one_line else 2, ensure_ascii=False, allow_nan=False))


@contextlib.contextmanager
def _sent(descriptor: int, target: int) -> Iterator[None]:
    """Send what is written to a file descriptor, also by C++, to another one."""
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


def stdout_is_for_json(json_alone: bool) -> contextlib.AbstractContextManager[None]:
    """Within this block, whatever a library prints on stdout goes to stderr instead, if so."""
    return _sent(1, 2) if json_alone else contextlib.nullcontext()


def progress() -> Progress:
    """A progress bar on stderr, which shows on a terminal only and vanishes at the end."""
    to = console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        console=to,
        transient=True,
        disable=not to.is_terminal,
    )


def usable(names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The frameworks that can be used here, each used once; and why the others can't."""
    reasons: dict[str, str] = {}
    early = [name for name in names if registry.metadata_of(name).loads_first]
    for name in dict.fromkeys((*early, *names)):
        try:
            # TensorFlow's C++ writes to stderr while it is imported, and no setting of its own stops that.
            with Path(os.devnull).open("w") as nowhere, _sent(2, nowhere.fileno()):
                arraybridge.convert_memory(np.zeros((2, 2), np.float32), name, copy=True)
        except MemoryConversionError as error:
            reasons[name] = str(error)
    return [name for name in names if name not in reasons], reasons


def module_of(name: str) -> Any:
    """The module of a framework that is loaded."""
    return next(sys.modules[one] for one in registry.metadata_of(name).packages if one in sys.modules)


def print_left_out(to: Console, reasons: Mapping[str, str]) -> None:
    """Say why frameworks were not used."""
    for name, reason in reasons.items():
        to.print(f"[yellow]{name} left out:[/yellow] {escape(reason)}")


def timer(call: Callable[[], object]) -> Callable[[int], float]:
    """A function from a number of rounds to the seconds of a call, the median of the rounds.

    A quick call is made so often in each round that the clock can tell its time.
    """
    count = int(_ROUND / arraybridge.benchmark(call, runs=3).minimum)

    def batch() -> None:
        for _ in range(count):
            call()

    def time_call(rounds: int) -> float:
        return arraybridge.benchmark(call, warmup=0, runs=rounds).median

    def time_batch(rounds: int) -> float:
        return arraybridge.benchmark(batch, warmup=0, runs=rounds).median / count

    return time_call if count < 2 else time_batch


# -- options -----------------------------------------------------------------------------------------


def size_in_bytes(words: str) -> int:
    """``"4MiB"`` as 4194304; B, K, KB, KiB, M, MB, MiB, G, GB and GiB are known, and KB means 1000.

    >>> size_in_bytes("1.5 KiB")
    1536
    """
    match = re.fullmatch(r"([\d._e+]+) *(?:b|([kmg])(i?b)?)?", words.strip().lower())
    try:
        number, prefix, suffix = match.groups() if match else ("", None, None)
        unit: int = (1000 if suffix == "b" else 1024) ** ("kmg".index(prefix) + 1 if prefix else 0)
        size = int(float(number) * unit)
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"{words!r} is no size; write it like 4MiB, 64KiB or 1000000") from None
    if size <= 0:
        raise typer.BadParameter(f"{words!r} is no size: it must be positive")
    return size


def chosen_frameworks(words: str | None) -> list[str]:
    """The frameworks of ``--frameworks torch,jax``, in that order; without it, all that are installed."""
    if words is None:
        return [name for name in registry.framework_names() if registry.is_installed(name)]
    names = list(dict.fromkeys(filter(None, (word.strip() for word in words.split(",")))))
    if not names:
        raise typer.BadParameter("names no framework; write it like torch,jax", param_hint="--frameworks")
    for name in names:
        try:
            if not registry.is_installed(registry.framework_name(name)):
                registry.framework(name)  # whose error names the extra to install
        except MemoryConversionError as error:
            raise typer.BadParameter(str(error), param_hint="--frameworks") from None
    return names


def writable(path: Path | None, option: str, *suffixes: str) -> None:
    """Refuse the path of a file that can't be written, before any work is done for it."""
    if path is None:
        return
    if suffixes and path.suffix not in suffixes:
        raise typer.BadParameter(f"{path} must end in {', '.join(suffixes)}", param_hint=option)
    try:
        path.open("ab").close()
    except OSError as error:
        raise typer.BadParameter(f"{path} can't be written: {error.strerror}", param_hint=option) from None
