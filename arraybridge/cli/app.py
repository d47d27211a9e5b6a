"""The program: its commands, and the options for all of them."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

import arraybridge
from arraybridge.cli import bench, demo, doctor, matrix, monitor, output, trace

app = typer.Typer(
    name="arraybridge",
    help="Arrays between NumPy, CuPy, PyTorch, JAX, TensorFlow and pyclesperanto.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"arraybridge {arraybridge.__version__}")
        raise typer.Exit


@app.callback(
    epilog="New here? Start with [bold]arraybridge demo[/bold]."
    " Something crashes? [bold]arraybridge doctor[/bold]."
)
def program(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Arrays between NumPy, CuPy, PyTorch, JAX, TensorFlow and pyclesperanto."""


for _command in (demo.demo, doctor.doctor, matrix.matrix, bench.bench, monitor.monitor, trace.trace):
    # What follows the script of `trace` is its own.
    _settings = {"allow_interspersed_args": _command is not trace.trace}
    app.command(help=output.paragraphs(_command.__doc__ or ""), context_settings=_settings)(_command)


def _exit_for_sigterm(*_: object) -> None:
    sys.exit(143)


def run() -> None:
    """Run the program as `arraybridge`, however it was started; leaves with its exit code."""
    # `kill` ends the program as Ctrl-C does, so that a terminal is never left without its cursor.
    signal.signal(signal.SIGTERM, _exit_for_sigterm)
    for name in ("stdin", "stdout", "stderr"):
        # Closed by who started it: the next file that is opened would take its number.
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115  # to the end
    for stream in (sys.stdout, sys.stderr):
        # A terminal that has no µ or → shows a question mark in its place.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        app(prog_name="arraybridge")
    except (OSError, MemoryError) as error:
        # A full disk behind stdout, for one. What is left in the buffers can't be written either.
        with contextlib.suppress(OSError):
            sys.stdout.close()
        typer.echo(f"arraybridge: {error or 'out of memory'}", err=True)
        raise SystemExit(1) from None
