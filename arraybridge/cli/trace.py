"""``arraybridge trace``: runs a program, and shows which of its lines copy arrays, and why."""

from __future__ import annotations

import contextlib
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from arraybridge.cli import output
from arraybridge.cli.script import run_module, run_script, run_to_its_end
from arraybridge.conversion.trace import TraceLog, everywhere
from arraybridge.timeline.hotspots import HotSpots

__all__ = ["TraceCommand", "trace"]

#: What comes before the program's own arguments and takes a value.
_WITH_VALUES = ("--save", "--html", "--top", "--limit")


class TraceCommand(TyperCommand):
    """What follows the script, or the module, is its own, whatever it looks like, as with ``python``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Divide the arguments between this command and the program."""
        i = 0
        while i < len(args):
            word = args[i]
            if word == "-m" and i + 1 < len(args):
                return super().parse_args(ctx, [*args[: i + 2], "--", *args[i + 2 :]])
            if word.startswith("-m") and not word.startswith("--") and len(word) > 2:
                return super().parse_args(ctx, [*args[:i], "-m", word[2:], "--", *args[i + 1 :]])
            if not word.startswith("-") or word in ("-", "--"):
                break
            i += 2 if word in _WITH_VALUES else 1
        return super().parse_args(ctx, [*args[:i], "--", *args[i:]] if args[i : i + 1] != ["--"] else args)


def trace(
    program: Annotated[
        list[str] | None,
        typer.Argument(help="The script and its arguments.", metavar="SCRIPT [ARGS]...", show_default=False),
    ] = None,
    module: Annotated[
        str | None,
        typer.Option("-m", help="Run a module in place of a script.", metavar="MODULE", show_default=False),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(help="Write the run for Perfetto (JSON).", metavar="FILE", show_default=False),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write the report as a page.", metavar="FILE", show_default=False)
    ] = None,
    top: Annotated[int, typer.Option(help="Lines to show.", min=1)] = 10,
    libraries: Annotated[
        bool,
        typer.Option(
            "--libraries/--without-libraries", help="Count what other libraries call of arraybridge, or not."
        ),
    ] = True,
    limit: Annotated[
        int, typer.Option(help="Events to keep; the oldest go and are counted.", min=1)
    ] = 1_000_000,
    as_json: Annotated[bool, typer.Option("--json", help="Print machine-readable JSON alone.")] = False,
) -> None:
    """Run a script, unchanged, and show which of its lines copy arrays, why, and what would save it.

    All that follows the script is its own. It runs as under `python`: arguments, exit code, traceback and
    Ctrl-C are the same. One that fails half-way still gets its table.

    Examples:
    [bold]arraybridge trace train.py --epochs 2[/bold]

    [bold]arraybridge trace --html report.html --save run.json train.py[/bold]

    [bold]arraybridge trace --top 5 -m my_package.train[/bold]
    """
    given = program or []
    if module is None and not given:
        raise typer.BadParameter("name a script, or a module by -m", param_hint="SCRIPT")
    if module is None and not Path(given[0]).exists():
        raise typer.BadParameter(f"there is no file {given[0]}", param_hint="SCRIPT")
    for path, option, suffix in ((save, "--save", ".json"), (html, "--html", "")):
        output.writable(path, option)
        if path is not None and suffix and path.suffix != suffix:
            raise typer.BadParameter(f"{path.name} must end in {suffix}", param_hint=option)
    # The program may change the folder.
    save, html = (None if path is None else path.absolute() for path in (save, html))
    run = partial(run_script, given[0], given[1:]) if module is None else partial(run_module, module, given)
    name = " ".join(given) if module is None else " ".join(["-m", module, *given])
    with output.stdout_is_for_json(as_json), everywhere(limit) as log:
        end = run_to_its_end(run)
    # It may have closed its output, which is no reason to lose the table.
    with contextlib.suppress(AttributeError, ValueError):
        sys.stdout.flush()
    if sys.stdout is None or sys.stdout.closed:
        sys.stdout = sys.__stdout__ if not getattr(sys.__stdout__, "closed", True) else sys.stderr
    _tell(log, log.hotspots(top, libraries=libraries), name, save, html, as_json)
    end()


def _tell(
    log: TraceLog, spots: HotSpots, name: str, save: Path | None, html: Path | None, as_json: bool
) -> None:
    if save is not None:
        with output.rewrite(save, "--save"):
            log.save(save)
    if html is not None:
        from arraybridge.timeline.page import page

        with output.rewrite(html, "--html"):
            html.write_text(page(log.events, spots, name), encoding="utf-8")
    if as_json:
        output.print_json({"program": name, "events": len(log.events), **spots.to_dict()})
        return
    typer.echo(repr(spots))
