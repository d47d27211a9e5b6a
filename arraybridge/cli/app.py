"""Assemble the program from its commands, and set up streams and signals for all of them."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import arraybridge
from arraybridge.cli import bench, demo, doctor, matrix, monitor, output, trace


def _hide_flag_types(parameters: list[Any]) -> list[Any]:
    """Remove the type from the help of flags: typer 0.29 lists each one as ``<bool>``."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters


class _Command(TyperCommand):
    """A command whose help shows flags without a type."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _hide_flag_types(super().get_params(ctx))


class _Group(TyperGroup):
    """The program, whose help shows flags without a type."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _hide_flag_types(super().get_params(ctx))


app = typer.Typer(
    name="arraybridge",
    cls=_Group,
    help="Convert arrays between NumPy, CuPy, PyTorch, JAX, TensorFlow and pyclesperanto.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"arraybridge {arraybridge.__version__}")
        raise typer.Exit


@app.callback(
    epilog="New to arraybridge? Run [bold]arraybridge demo[/bold]."
    " Something fails? Run [bold]arraybridge doctor[/bold]."
)
def program(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Convert arrays between NumPy, CuPy, PyTorch, JAX, TensorFlow and pyclesperanto."""


for _command in (demo.demo, doctor.doctor, matrix.matrix, bench.bench, monitor.monitor, trace.trace):
    # Options after the script of `trace` belong to the script.
    _settings = {"allow_interspersed_args": _command is not trace.trace}
    _help = output.join_lines(_command.__doc__ or "")
    app.command(cls=_Command, help=_help, context_settings=_settings)(_command)


def _exit_for_sigterm(*_: object) -> None:
    sys.exit(143)


def run() -> None:
    """Run the program under the name `arraybridge`, and exit with its exit code."""
    # Handle `kill` like Ctrl-C, so that the terminal always gets its cursor back.
    signal.signal(signal.SIGTERM, _exit_for_sigterm)
    for name in ("stdin", "stdout", "stderr"):
        # If the parent process closed a stream, the next file to be opened would get its descriptor.
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115  # open until exit
    for stream in (sys.stdout, sys.stderr):
        # Print a question mark in place of µ or → if the terminal does not support the character.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        app(prog_name="arraybridge")
    except (OSError, MemoryError) as error:
        # If stdout is a file on a full disk, the rest of the buffer cannot be written either.
        with contextlib.suppress(OSError):
            sys.stdout.close()
        typer.echo(f"arraybridge: {error or 'out of memory'}", err=True)
        raise SystemExit(1) from None
