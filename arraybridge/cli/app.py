"""The program: its commands and its options for all of them."""

from __future__ import annotations

from typing import Annotated

import typer

import arraybridge
from arraybridge.cli.demo import demo

app = typer.Typer(
    name="arraybridge",
    help="Arrays between NumPy, CuPy, PyTorch, JAX, TensorFlow and pyclesperanto.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"arraybridge {arraybridge.__version__}")
        raise typer.Exit


@app.callback()
def program(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Arrays between NumPy, CuPy, PyTorch, JAX, TensorFlow and pyclesperanto."""


app.command()(demo)
