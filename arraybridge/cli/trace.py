"""``arraybridge trace``: run a script and show which of its lines copy arrays, and why."""

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

from arraybridge.cli import option_parsing, output
from arraybridge.formatting import page
from arraybridge.tracing.trace_log import everywhere
from arraybridge.tracing.user_lines import as_own


def trace(
    script: Annotated[str, typer.Argument(help="The script to run.", metavar="SCRIPT")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="The arguments of the script.", metavar="ARGS")
    ] = None,
    is_module: Annotated[bool, typer.Option("-m", help="Run SCRIPT as a module, as python -m does.")] = False,
    save: Annotated[
        Path | None, typer.Option(help="Write the trace for Perfetto (.json).", metavar="FILE")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write the report as an HTML page.", metavar="FILE")
    ] = None,
    top: Annotated[int, typer.Option(help="Number of lines to show.", min=1, metavar="N")] = 10,
    without_libraries: Annotated[
        bool, typer.Option("--without-libraries", help="Ignore conversions inside other libraries.")
    ] = False,
    ours: Annotated[
        bool, typer.Option("--ours", help="Ignore conversions by the frameworks' own functions.")
    ] = False,
    limit: Annotated[int, typer.Option(help="Keep the last N events.", min=1, metavar="N")] = 1_000_000,
    as_json: output.AsJson = False,
) -> None:
    """Run a script unchanged, and show which of its lines copy arrays, why, and how to avoid the copies.

    Conversions by the frameworks' own functions are included, such as torch.from_numpy(x) or np.asarray(x).
    The options of this command come before the script.
    The exit code is that of the script.
    If the script fails, the table shows its conversions up to that point.

    Examples:
    [bold]arraybridge trace train.py --epochs 2[/bold]

    [bold]arraybridge trace --html report.html --save run.json train.py[/bold]

    [bold]arraybridge trace --top 5 -m my_package.train[/bold]
    """
    program = [script, *(arguments or ())]
    if not is_module and not Path(script).exists():
        raise typer.BadParameter(
            f"File {script} does not exist. To run a module, use arraybridge trace -m MODULE.",
            param_hint="SCRIPT",
        )
    option_parsing.check_writable(save, "--save", ".json")
    option_parsing.check_writable(html, "--html")
    # The script may change the working directory.
    save, html = (None if path is None else path.absolute() for path in (save, html))
    with output.reserve_stdout(as_json), everywhere(limit, foreign=not ours) as log:
        code = _run(program, is_module)
        sys.stdout.flush()
    name = " ".join(["-m", *program] if is_module else program)
    spots = log.hotspots(top, libraries=not without_libraries)
    if save is not None:
        log.save(save)
    if html is not None:
        table = f'<div class="wide">{spots._repr_html_()}</div>'
        html.write_text(page(name, table), encoding="utf-8")
    if as_json:
        output.print_json({"program": name, "events": len(log.events), **spots.to_dict()})
    else:
        typer.echo(repr(spots))
    sys.exit(code)


def _run(program: Sequence[str], is_module: bool) -> Any:
    """Run the script as ``python`` does, print its traceback if it fails, and return its exit code.

    Raises:
        BadParameter: If there is no such program.
    """
    sys.argv[:] = program
    # Processes that multiprocessing spawns import the script as __mp_main__ (multiprocessing/spawn.py). The
    # classes of objects that these processes send back are looked up in this module.
    alias = sys.modules["__mp_main__"] = ModuleType("__mp_main__")
    vars(alias)["__getattr__"] = _attribute_of_main
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # undo the handler of `arraybridge.cli.app`
    if not sys.flags.safe_path:
        sys.path[0] = str(Path.cwd() if is_module else Path(program[0]).resolve().parent)
    try:
        if is_module:
            _count_as_user_code(program[0])
            runpy.run_module(program[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(Path(program[0]).absolute()), run_name="__main__")
    except SystemExit as error:
        return error.code
    except BaseException as error:  # noqa: BLE001  # the script may raise any exception
        traceback = _without_callers(error.__traceback__)
        if traceback is None and isinstance(error, (ImportError, OSError)):
            raise _missing_program(program[0], is_module, error) from None
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _missing_program(name: str, is_module: bool, error: ImportError | OSError) -> typer.BadParameter:
    """Return the usage error for a program that was not found or could not be read."""
    cause = error.__cause__ if is_module else None  # its message is shorter
    reason = getattr(error, "strerror", None) or cause or error
    program = f"the module {name}" if is_module else name
    return typer.BadParameter(
        f"Cannot run {program}: {reason}. Pass the path of a script, or -m and a module that python -m can"
        " run.",
        param_hint="SCRIPT",
    )


def _attribute_of_main(name: str) -> Any:
    return getattr(sys.modules["__main__"], name)


def _count_as_user_code(module: str) -> None:
    """Treat the package of a module as user code, even if it is installed as a library."""
    package = module.partition(".")[0]
    spec = importlib.util.find_spec(package) if package else None  # "" for a relative name
    for folder in () if spec is None else spec.submodule_search_locations or [spec.origin or module]:
        as_own(folder)


def _without_callers(traceback: TracebackType | None) -> TracebackType | None:
    """Return the traceback starting at the script's first frame; None if no line of the script ran."""
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if file not in (__file__, runpy.__file__) and not file.startswith("<frozen "):
            return traceback
        traceback = traceback.tb_next
    return None
