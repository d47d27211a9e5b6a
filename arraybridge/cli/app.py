"""The program: its commands and its options for all of them."""

from __future__ import annotations

import contextlib
import io
import signal
import sys
from typing import Annotated

import typer

import arraybridge
from arraybridge.cli.bench import bench
from arraybridge.cli.demo import demo
from arraybridge.cli.doctor import doctor
from arraybridge.cli.matrix import matrix
from arraybridge.cli.monitor import monitor
from arraybridge.cli.output import paragraphs
from arraybridge.cli.trace import trace

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


for _command in (demo, doctor, matrix, bench, monitor):
    app.command(help=paragraphs(_command.__doc__ or ""))(_command)
# What follows the script is its own.
app.command(help=paragraphs(trace.__doc__ or ""), context_settings={"allow_interspersed_args": False})(trace)


def run() -> None:
    """Run the program as `arraybridge`, however it was started; leaves with its exit code."""
    # `kill` ends the program as Ctrl-C does, so that a terminal is never left without its cursor.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
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
