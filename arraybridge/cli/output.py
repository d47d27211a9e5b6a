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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

import arraybridge
from arraybridge.errors import MemoryConversionError, UnknownFrameworkError
from arraybridge.frameworks import registry
from arraybridge.frameworks.presence import can_find
from arraybridge.memory.stats import memory_stats
from arraybridge.show import format_bytes, text_table

__all__ = [
    "as_numpy_allocates",
    "check_fits",
    "chosen_frameworks",
    "coloured",
    "console",
    "no_colour",
    "paragraphs",
    "plot_file",
    "print_json",
    "progress",
    "quiet",
    "rewrite",
    "safest_first",
    "seconds",
    "show",
    "size_in_bytes",
    "stdout_is_for_json",
    "table",
    "timer",
    "writable",
]

_ROUND = 2e-3  # seconds: long enough for the clock, short enough to miss most interruptions


def no_colour() -> bool:
    """Whether the user wants no colours (https://no-color.org): NO_COLOR is there and not empty."""
    return bool(os.environ.get("NO_COLOR"))


def console(stderr: bool = False) -> Console:
    """A console that writes no escape codes into a pipe or a file, nor anywhere under NO_COLOR.

    A pipe has no width: no line is broken there, unless COLUMNS says how wide it is.
    """
    made = Console(stderr=stderr, color_system=None if no_colour() else "auto", highlight=False)
    if not made.is_terminal and not os.environ.get("COLUMNS"):
        made.width = 1_000_000
    return made


def paragraphs(words: str) -> str:
    """Words with the lines of each paragraph joined, for whoever breaks them anew at another width."""
    blocks = re.split(r"\n\s*\n|(?<=:)\n", inspect.cleandoc(words))  # a heading ends in a colon
    return "\n\n".join(" ".join(block.split("\n")) for block in blocks)


def coloured(words: str, style: str) -> str:
    """Plain words as rich's markup."""
    return f"[{style}]{escape(words)}[/]" if style and words else escape(words)


def _length(markup: str) -> int:
    return Text.from_markup(markup).cell_len


def table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str], width: int | None
) -> str:
    """A table in rich's markup, of cells in rich's markup; see `arraybridge.show.text_table`."""

    def strong(words: str) -> str:
        return f"[bold]{words}[/bold]" if words else ""

    return text_table(columns, rows, right=right, width=width, length=_length, strong=strong)


def show(
    to: Console, columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()
) -> None:
    """Print a table; where it is wider than the console, each row as a block of lines.

    Args:
        to: where to print.
        columns: headings; the first names the row.
        rows: cells in rich's markup.
        right: the columns of numbers, which are set flush right.
    """
    to.print(table(columns, rows, right, to.width))


def print_json(document: Any, *, one_line: bool = False) -> None:
    """Print a JSON document on stdout."""
    typer.echo(json.dumps(document, indent=None if one_line else 2, ensure_ascii=False, allow_nan=False))


@contextlib.contextmanager
def _sent(descriptor: int, target: int) -> Iterator[None]:
    """Send what is written to a file descriptor, also by C++, to another one."""
    (sys.stdout if descriptor == 1 else sys.stderr).flush()
    kept = os.dup(descriptor)
    os.dup2(target, descriptor)
    try:
        yield
    finally:
        (sys.stdout if descriptor == 1 else sys.stderr).flush()
        os.dup2(kept, descriptor)
        os.close(kept)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drop what C++ writes to stderr while frameworks are imported; no setting of TensorFlow's stops it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        with _sent(2, nowhere):
            yield
    finally:
        os.close(nowhere)


@contextlib.contextmanager
def stdout_is_for_json(wanted: bool) -> Iterator[None]:
    """Within this block, whatever a library prints on stdout goes to stderr instead, if ``wanted``."""
    if not wanted:
        yield
        return
    with _sent(1, 2):
        yield


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


def as_numpy_allocates(array: np.ndarray) -> np.ndarray:
    """A copy in memory like that of NumPy's own large arrays: 16 bytes past an address divisible by 64.

    NumPy aligns to 16 bytes. Small arrays are aligned to 64 by chance, large ones never are.
    """
    room = arraybridge.aligned(array.nbytes + 16, "uint8")[16:]
    own = room.view(array.dtype).reshape(array.shape)
    own[...] = array
    return own


def timer(call: Callable[[], object]) -> Callable[[int], float]:
    """A function from a number of rounds to the seconds of a call, the median of the rounds.

    A quick call is made so often in each round that the clock can tell its time.
    """
    count = int(_ROUND / arraybridge.benchmark(call, runs=3).minimum)

    def batch() -> None:
        for _ in range(count):
            call()

    if count < 2:
        return lambda rounds: arraybridge.benchmark(call, warmup=0, runs=rounds).median
    return lambda rounds: arraybridge.benchmark(batch, warmup=0, runs=rounds).median / count


# -- options -----------------------------------------------------------------------------------------


def size_in_bytes(words: str) -> int:
    """``"4MiB"`` as 4194304; B, K, KB, KiB, M, MB, MiB, G, GB and GiB are known, and KB means 1000.

    Raises:
        typer.BadParameter: it is no size, or none that is positive.

    >>> size_in_bytes("1.5 KiB")
    1536
    """
    units = {"": 1, "b": 1, "k": 1 << 10, "kib": 1 << 10, "kb": 1000, "m": 1 << 20, "mib": 1 << 20}
    units |= {"mb": 1000**2, "g": 1 << 30, "gib": 1 << 30, "gb": 1000**3}
    plain = words.strip().lower()
    number = plain.rstrip("bkmgi").strip()
    unit = plain[len(number) :].strip()
    try:
        size = int(float(number) * units[unit])
    except (ValueError, KeyError, OverflowError):
        raise typer.BadParameter(f"{words!r} is no size; write it like 4MiB, 64KiB or 1000000") from None
    if size <= 0:
        raise typer.BadParameter(f"{words!r} is no size: it must be positive")
    return size


def check_fits(nbytes: int, copies: int, option: str = "--size") -> None:
    """Refuse a size of which so many copies don't fit into the host's free memory.

    Linux promises more memory than it has, and ends the process that uses it: no error can be caught.

    Raises:
        typer.BadParameter: it does not fit.
    """
    free = memory_stats()["cpu"].free
    if free is not None and nbytes * copies > free:
        raise typer.BadParameter(
            f"{format_bytes(nbytes)} is too much: {copies} arrays of it are needed at once, and"
            f" {format_bytes(free)} of memory is free",
            param_hint=option,
        )


def chosen_frameworks(words: str | None) -> list[str]:
    """The frameworks of ``--frameworks torch,jax``, in that order; without it, all that are installed.

    Raises:
        typer.BadParameter: one is unknown, or is not installed.
    """
    if words is None:
        return [name for name in registry.framework_names() if registry.is_installed(name)]
    names = list(dict.fromkeys(filter(None, (word.strip() for word in words.split(",")))))
    if not names:
        raise typer.BadParameter("names no framework; write it like torch,jax", param_hint="--frameworks")
    for name in names:
        try:
            registry.framework_name(name)
        except UnknownFrameworkError as error:
            raise typer.BadParameter(str(error), param_hint="--frameworks") from None
        if not registry.is_installed(name):
            # The message that importing it would give names the extra to install.
            try:
                registry.framework(name)
            except MemoryConversionError as error:
                raise typer.BadParameter(str(error), param_hint="--frameworks") from None
    return names


def writable(path: Path | None, option: str) -> Path | None:
    """The path of a file to write, checked before any work is done for it.

    Raises:
        typer.BadParameter: no file can be written there.
    """
    if path is None:
        return None
    why = ""
    if path.is_dir():
        why = "it is a folder"
    elif not path.parent.is_dir():
        why = f"there is no folder {path.parent}"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        why = "permission is denied"
    if why:
        raise typer.BadParameter(f"{path} can't be written: {why}", param_hint=option)
    return path


def plot_file(path: Path | None, option: str) -> None:
    """Refuse what no picture can be written to, before any work is done for it.

    Raises:
        typer.BadParameter: matplotlib is missing, the suffix is no picture's, or the place can't be written.
    """
    if path is None:
        return
    writable(path, option)
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise typer.BadParameter(f"{path.name} must end in .png, .svg or .pdf", param_hint=option)
    if not can_find("matplotlib"):
        raise typer.BadParameter("pictures need matplotlib; run pip install matplotlib", param_hint=option)


def safest_first(names: list[str]) -> list[str]:
    """The frameworks in an order that harms nobody: a system's PoCL ends a process after TensorFlow."""
    return sorted(names, key=lambda name: name != "pyclesperanto")


@contextlib.contextmanager
def rewrite(path: Path, option: str) -> Iterator[None]:
    """Turn the failure to write a file (a full disk, say) into the error of an option."""
    try:
        yield
    except OSError as error:
        raise typer.BadParameter(
            f"{path} can't be written: {error.strerror or error}", param_hint=option
        ) from None


def seconds(minimum: float) -> Callable[[float], float]:
    """A check for an option in seconds: a finite number, at least ``minimum``."""

    def check(value: float) -> float:
        if not minimum <= value < 1e9:  # also refuses nan
            raise typer.BadParameter(f"{value} is out of range; pass at least {minimum:g} seconds")
        return value

    return check
