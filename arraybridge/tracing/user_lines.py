"""Find the line of the user's code that a conversion or call belongs to."""

from __future__ import annotations

import sys
from contextvars import ContextVar
from os.path import dirname, sep
from types import CodeType, FrameType
from typing import Any, Literal, overload

from arraybridge.caches import new_cache, remember
from arraybridge.hooks import hooks
from arraybridge.interface import registry

__all__ = ["as_own", "handed_out", "line_of", "site"]


#: A line of the user's code: its file, its code object, the offset of the instruction in that object, and the
#: library that made the call from the line, or "". `line_of` finds the line number later, because it is slow.
Site = tuple[str, CodeType, int, str]


def is_user_file(file: str) -> bool:
    """Return whether a file that appeared in a trace is the user's own code."""
    return _owners.get(file, _USERS) in (_USERS, _CELLS)


def line_of(site: Site) -> int:
    """Return the line number of a `Site`."""
    _, code, at, _ = site
    for start, end, line in code.co_lines():
        if start <= at < end and line is not None:
            return line
    return code.co_firstlineno


#: The line that submitted the work of this thread, for worker threads without the user's code on the stack.
handed_out: ContextVar[Site | None] = ContextVar("arraybridge_handed_out", default=None)
_OURS, _USERS, _CELLS, _PYTHON = "arraybridge", "the user", "a notebook of the user", "Python"
_PACKAGE = dirname(dirname(__file__)) + sep  # noqa: PTH120  # importing pathlib costs 3 ms
# The owner of each file: `_OURS`, `_USERS`, `_CELLS` (the user's notebook cells), `_PYTHON` (also for
# frameworks), or the name of another library.
_owners: dict[str, str] = new_cache()
# Folders of installed packages that count as the user's code, as in `arraybridge trace -m package`.
_own_folders: list[str] = []
# Name of a notebook cell → the file name under which `linecache` stores its source.
_cells: dict[str, str] = {}
#: Prefixes of the file names of code that users type in; other names in angle brackets are generated code.
_TYPED_IN = ("<stdin>", "<string>", "<console>", "<ipython-input", "<python-input", "<doctest")


@overload
def site(frame: FrameType | None = None, *, is_native_call: Literal[False] = False) -> Site: ...


@overload
def site(frame: FrameType | None = None, *, is_native_call: bool) -> Site | None: ...


def site(frame: FrameType | None = None, *, is_native_call: bool = False) -> Site | None:
    """Return the innermost line of the user's code on the stack of this thread.

    If the stack does not contain the user's code, return the line that submitted the work of this thread. If
    there is no such line either, as in the threads of a library, return the innermost line of a library, a
    framework or Python's standard library, in that order of preference.

    Args:
        frame: The frame to start from. Defaults to the caller.
        is_native_call: Whether the frame called a framework. The result is then None for calls by arraybridge
            itself, which are steps of its own conversions.
    """
    # Start at the caller's frame: a frame that refers to itself keeps the objects of its callers alive.
    frame = frame or sys._getframe(1)  # noqa: SLF001  # half the time of inspect.currentframe().f_back
    first = frame
    library = ""
    while frame is not None:
        file = frame.f_code.co_filename
        owner = _owners.get(file) or _owner_of_new(file)
        if owner == _OURS:
            if is_native_call:
                return None
            library = ""  # arraybridge made the call, not a library
        elif owner == _USERS:
            return file, frame.f_code, frame.f_lasti, library
        elif owner == _CELLS:
            return _notebook_cell(file), frame.f_code, frame.f_lasti, library
        elif owner != _PYTHON:
            library = library or owner
        frame = frame.f_back
    return handed_out.get() or _site_in_library(first)


def _site_in_library(frame: FrameType | None) -> Site:
    """Return the innermost line of a library on a stack without the user's code; see `site`."""
    # Frames of frameworks are preferred to those of Python, and both to those of arraybridge.
    ranked: dict[tuple[bool, bool], tuple[FrameType, str]] = {}
    while frame is not None:
        file = frame.f_code.co_filename
        owner = _owners.get(file) or _owner_of_new(file)
        if owner not in (_OURS, _PYTHON):
            return file, frame.f_code, frame.f_lasti, owner
        installed = "" if owner == _OURS else _package_of(file)
        ranked.setdefault((owner == _OURS, not installed), (frame, installed or _PYTHON))
        frame = frame.f_back
    innermost, library = ranked[min(ranked)]
    return innermost.f_code.co_filename, innermost.f_code, innermost.f_lasti, library


def _user_line() -> tuple[str, int]:
    """Return the file and number of the innermost line of the user's code, for warnings."""
    user_site = site()
    return _cells.get(user_site[0], user_site[0]), line_of(user_site)


hooks.user_line = _user_line


def as_own(folder: str) -> None:
    """Treat files in the folder as the user's code, even if they are installed like a library."""
    _own_folders.append(folder)
    _owners.clear()


def _owner_of_new(file: str) -> str:
    owner = _owner_of(file)
    if owner == _USERS and ("ipython" in file or "ipykernel" in file):
        owner = _CELLS
    return remember(_owners, file, owner)


def _owner_of(file: str) -> str:
    if file.startswith(_PACKAGE):
        return _OURS
    if file.startswith("<"):
        return _USERS if file.startswith(_TYPED_IN) else _PYTHON
    if file.startswith(tuple(_own_folders)):
        return _USERS
    library = _package_of(file)
    if library:
        of_frameworks = (registry.metadata_of(name).packages for name in registry.framework_names())
        examined = {"numpy", "optree", "IPython", "ipykernel"}.union(*of_frameworks)
        return _PYTHON if library in examined else library
    import sysconfig

    python = (sysconfig.get_path(name) + sep for name in ("stdlib", "platstdlib"))
    return _PYTHON if file.startswith(tuple(python)) else _USERS


def _package_of(file: str) -> str:
    """Return the name of the installed package that a file belongs to; ``""`` if it belongs to none."""
    *folders, last = file.replace("\\", "/").split("/")
    for installed in {"site-packages", "dist-packages"}.intersection(folders):
        return [*folders, last][folders.index(installed) + 1].removesuffix(".py")
    return ""


def _notebook_cell(file: str) -> str:
    """Return the name of a notebook cell in tracebacks, such as ``"In[3]"``; the file name if it has none.

    The name of a cell changes when the cell runs again.
    """
    ipython: Any = sys.modules.get("IPython")
    shell = ipython and ipython.get_ipython()
    formatted = shell and shell.compile.format_code_name(file)
    if not formatted:
        return file
    _cells[formatted[1]] = file
    return str(formatted[1])


def source_line(file: str, line: int) -> str:
    """Return the text of a line of code without surrounding whitespace; ``""`` if it is unavailable."""
    import linecache

    return linecache.getline(_cells.get(file, file), line).strip()
