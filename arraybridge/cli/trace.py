"""``arraybridge trace``: runs a program, and shows which of its lines copy arrays, and why."""

from __future__ import annotations

import importlib.util
import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Annotated, Any

import typer

from arraybridge.cli import output
from arraybridge.tracing.events import as_own
from arraybridge.tracing.export import page
from arraybridge.tracing.trace_log import everywhere

__all__ = ["trace"]


def trace(
    program: Annotated[
        list[str],
        typer.Argument(help="The script and its arguments.", metavar="SCRIPT [ARGS]..."),
    ],
    is_module: Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module.")] = False,
    save: Annotated[
        Path | None, typer.Option(help="Write the run for Perfetto (JSON).", metavar="FILE")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write the report as a page.", metavar="FILE")] = None,
    top: Annotated[int, typer.Option(help="Lines to show.", min=1)] = 10,
    libraries: Annotated[
        bool, typer.Option("--libraries/--without-libraries", help="Count what other libraries convert.")
    ] = True,
    ours: Annotated[bool, typer.Option("--ours", help="Leave out the frameworks' own calls.")] = False,
    limit: Annotated[int, typer.Option(help="Events to keep; the oldest go.", min=1)] = 1_000_000,
    as_json: output.AsJson = False,
) -> None:
    """Run a script, unchanged, and show which of its lines copy arrays, why, and what would save it.

    Conversions by the frameworks' own calls count, as torch.from_numpy and np.asarray of a tensor.
    All that follows the script is its own, and so is the exit code. One that fails half-way still gets its
    table.

    Examples:
    [bold]arraybridge trace train.py --epochs 2[/bold]

    [bold]arraybridge trace --html report.html --save run.json train.py[/bold]

    [bold]arraybridge trace --top 5 -m my_package.train[/bold]
    """
    if not is_module and not Path(program[0]).exists():
        raise typer.BadParameter(f"there is no file {program[0]}", param_hint="SCRIPT")
    output.writable(save, "--save", ".json")
    output.writable(html, "--html")
    # The program may change the folder.
    save, html = (None if path is None else path.absolute() for path in (save, html))
    with output.stdout_is_for_json(as_json), everywhere(limit, foreign=not ours) as log:
        code = _run(program, is_module)
        sys.stdout.flush()
    name = " ".join(["-m", *program] if is_module else program)
    spots = log.hotspots(top, libraries=libraries)
    if save is not None:
        log.save(save)
    if html is not None:
        html.write_text(page(log.events, spots, name), encoding="utf-8")
    if as_json:
        output.print_json({"program": name, "events": len(log.events), **spots.to_dict()})
    else:
        typer.echo(repr(spots))
    sys.exit(code)


def _run(program: Sequence[str], is_module: bool) -> Any:
    """Run the program as ``python`` does; the exit code, after its traceback has been shown."""
    sys.argv[:] = program
    # Where processes that it spawns find their classes: they call the main module so, whichever runs as that.
    spawned = sys.modules["__mp_main__"] = ModuleType("__mp_main__")
    vars(spawned)["__getattr__"] = _attribute_of_main
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # which `arraybridge` takes for Ctrl-C
    if not sys.flags.safe_path:
        sys.path[0] = str(Path.cwd() if is_module else Path(program[0]).resolve().parent)
    try:
        if is_module:
            _count_as_own(program[0])
            runpy.run_module(program[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(Path(program[0]).absolute()), run_name="__main__")
    except SystemExit as error:
        return error.code
    except BaseException as error:  # noqa: BLE001  # whatever ends the program is its own, and is shown
        own = _without_callers(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(own), own)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _attribute_of_main(name: str) -> Any:
    return getattr(sys.modules["__main__"], name)


def _count_as_own(module: str) -> None:
    """Where it is installed, it is the user's program all the same."""
    spec = importlib.util.find_spec(module.partition(".")[0])
    for folder in () if spec is None else spec.submodule_search_locations or [spec.origin or module]:
        as_own(folder)


def _without_callers(traceback: TracebackType | None) -> TracebackType | None:
    """The traceback from the program's first line on; None where there is none, as in a syntax error."""
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if file not in (__file__, runpy.__file__) and not file.startswith("<frozen "):
            return traceback
        traceback = traceback.tb_next
    return None
