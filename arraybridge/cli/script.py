"""Running somebody's program as ``python SCRIPT`` and ``python -m MODULE`` do."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import importlib.util
import os
import runpy
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import TracebackType
from typing import Any

from arraybridge.timeline.events import as_own

__all__ = ["run_module", "run_script"]


class _Loader(SourceFileLoader):
    """Loads a script, and leaves no compiled file beside it, as Python does not for one either."""

    def path_stats(self, path: str) -> dict[str, object]:
        raise OSError(f"{path} is a script")


def run_script(path: str, arguments: Sequence[str]) -> None:
    """Run a file, or a folder or archive with a ``__main__.py``; raises what it raises."""
    sys.argv = [path, *arguments]
    if not Path(path).is_file() or path.endswith((".zip", ".pyz", ".pyc")):
        _search_first(path)
        runpy.run_path(path, _as_in_main(), run_name="__main__")
        return
    file = os.path.join(os.getcwd(), path)  # noqa: PTH109, PTH118  # as Python does, which leaves ./ in it
    _search_first(str(Path(path).resolve().parent))
    spec = importlib.util.spec_from_file_location("__main__", file, loader=_Loader("__main__", file))
    if spec is None or spec.loader is None:  # never, with a loader given
        raise ImportError(f"{path} can't be loaded")
    module = importlib.util.module_from_spec(spec)
    module.__spec__ = None  # by which multiprocessing knows a script
    # A script may ask `__package__ is None`.
    module.__dict__.update(_as_in_main(), __package__=None, __cached__=None)
    sys.modules["__main__"] = module
    spec.loader.exec_module(module)


def run_module(name: str, arguments: Sequence[str]) -> None:
    """Run a module, or a package's ``__main__``; raises what it raises."""
    sys.argv = [name, *arguments]
    _search_first(str(Path.cwd()))
    found = importlib.util.find_spec(name.partition(".")[0])
    if found is not None:  # where it is installed, it is the user's program all the same
        for folder in found.submodule_search_locations or [found.origin or name]:
            as_own(folder)
    runpy.run_module(name, _as_in_main(), run_name="__main__", alter_sys=True)


def _as_in_main() -> dict[str, Any]:
    """What Python has otherwise in modules that it imports than in the program."""
    names: dict[str, Any] = {"__builtins__": builtins}
    if sys.version_info < (3, 14):
        names["__annotations__"] = {}
    return names


def _search_first(folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path[0] = folder


# -- how it ends -------------------------------------------------------------------------------------


def run_to_its_end(run: Callable[[], None]) -> Callable[[], None]:
    """Run a program; returns what ends this process as the program would have ended its own.

    Its traceback is shown at once, without the lines of what has called it.
    """
    atexit.register(_die_of_interrupt)  # what is registered first is called last
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # which `arraybridge` takes for Ctrl-C
    try:
        run()
    except SystemExit as error:
        left = error.code
        return lambda: sys.exit(left)
    except KeyboardInterrupt as error:
        _show(error)
        return _end_by_interrupt
    except BaseException as error:  # noqa: BLE001  # whatever ends the program is its own, and is shown
        _show(error)
        return lambda: sys.exit(1)
    return lambda: None


def _show(error: BaseException) -> None:
    """As Python shows what nobody has caught."""
    own = _without_callers(error.__traceback__)
    with contextlib.suppress(AttributeError, ValueError):  # the program has closed it
        sys.stdout.flush()
    sys.excepthook(type(error), error.with_traceback(own), own)


def _without_callers(found: TracebackType | None) -> TracebackType | None:
    """The traceback from the program's first line on; None where there is none, as in a syntax error."""
    machinery = (__file__, runpy.__file__)
    while found is not None:
        file = found.tb_frame.f_code.co_filename
        if file not in machinery and not file.startswith("<frozen "):
            return found
        found = found.tb_next
    return None


# Whether Ctrl-C has ended the program.
_interrupted: list[bool] = []


def _end_by_interrupt() -> None:
    _interrupted.append(True)
    sys.exit(130)


def _die_of_interrupt() -> None:
    """Ctrl-C ends a program by the signal, after all that it has left for its end."""
    if _interrupted and sys.platform != "win32":
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
