"""One thing that happened while a trace was open, and the line of the user's code that it belongs to."""

from __future__ import annotations

import ctypes
import math
import sys
import weakref
from contextvars import ContextVar
from itertools import count
from os.path import dirname, sep
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from arraybridge.errors import MemoryConversionError, outside
from arraybridge.frameworks import registry
from arraybridge.frameworks.base import Framework, is_c_contiguous
from arraybridge.trees import ARRAY, kind_of, kinds, leaves_of, source_of

if TYPE_CHECKING:
    from arraybridge.conversion.explanation import Route

__all__ = [
    "Event",
    "Site",
    "as_own",
    "began",
    "device_words",
    "handed_out",
    "layout",
    "line_of",
    "same_array",
    "site",
    "source_line",
    "steps",
]


class Event(NamedTuple):
    """One thing that happened while a trace was open.

    Attributes:
        kind: ``"conversion"``; ``"call"`` of a decorated function; ``"decision"`` of `gpu`; ``"stage"`` of a
            `Pipeline`; ``"item"`` of `device_map` or `prefetch`; ``"retry"``, ``"split"`` and ``"grow"`` of a
            recovery, and its ``"clean-up"``.
        name: the function, the stage, or ``"numpy → jax"``.
        start: seconds since the trace was opened.
        seconds: how long it took, as its thread saw it; 0 for what has no length. What is queued on a card
            may go on after that.
        thread: name of the thread.
        device: where, in words; ``""`` where it is not known.
        file, line: of the user's own code. In a worker thread, where the work was handed out; in a notebook,
            ``"In[3]"`` stands for the file.
        nbytes: bytes that a conversion copied, each copy counted, or that a clean-up freed; else 0.
        reason: why, in words: of a conversion, of a decision, of a step of a recovery; or the error that
            ended a call.
        library: the other library that called arraybridge from there; ``""`` where the line did so itself.
        item: number of the item or microbatch; None for what belongs to none.
        flow: the same word for all events of one item on its way through the stages; or ``""``.
        thread_id: number of the thread, for threads of one name.
        route: of a conversion, as in ``log.records``; else None.
        layout: of the array that was copied: ``"transposed"``, ``"reversed"``, ``"broadcast"``, ``"sliced"``,
            or ``""`` where it lies in order.
        array: the same for two copies of the very same array; None where that cannot be told.
    """

    kind: str
    name: str
    start: float
    seconds: float
    thread: str
    device: str
    file: str
    line: int
    nbytes: int = 0
    reason: str = ""
    library: str = ""
    item: int | None = None
    flow: str = ""
    thread_id: int = 0
    route: Route | None = None
    layout: str = ""
    array: tuple[Any, ...] | None = None

    @property
    def where(self) -> str:
        """File and line, ``"train.py:12"``; files below the working directory without the way there."""
        if not self.file:
            return "?"
        from pathlib import Path  # costs 3 ms, which `import arraybridge` saves

        path = Path(self.file)
        try:
            shown = path.relative_to(Path.cwd()) if path.is_absolute() else path
        except (ValueError, OSError):  # it lies elsewhere; or the working directory is gone
            shown = path
        return f"{shown}:{self.line}"

    def to_dict(self) -> dict[str, Any]:
        """Plain strings and numbers, ready for JSON."""
        names = ("kind", "name", "start", "seconds", "thread", "device", "file", "line", "nbytes", "reason")
        found = {name: getattr(self, name) for name in (*names, "library", "item", "flow", "layout")}
        if self.route is not None:
            found["source"], found["target"] = self.route.source, self.route.target
            found["method"], found["copies"] = self.route.method, self.route.copies
        return found


def began(event: Event) -> tuple[float, float]:
    """What events are sorted by: their start, and where that is the same the longest first."""
    return event.start, -event.seconds


# -- where -------------------------------------------------------------------------------------------


#: A line of the user's code: its file, the code and the instruction in it, and the other library in between,
#: if any. The line itself is found by `line_of` when somebody asks, since that takes the longer the later it
#: stands in its function. Where there is no code any more, as in a log that was pickled, the line stands for
#: the instruction.
Site = tuple[str, CodeType | None, int, str]


def line_of(site: Site) -> int:
    """The number of the line."""
    _, code, at, _ = site
    if code is None:
        return at
    for start, end, line in code.co_lines():
        if start <= at < end and line is not None:
            return line
    return code.co_firstlineno


#: Where the work of this thread was handed out, for lines of a worker thread in which no code of the user is.
handed_out: ContextVar[Site | None] = ContextVar("arraybridge_handed_out", default=None)

_OURS, _USERS, _CELL, _PYTHON = "arraybridge", "", "a notebook's cell", "Python"
_HERE = dirname(dirname(__file__)) + sep  # noqa: PTH120  # pathlib costs 3 ms
# File of a function → whose it is: one of the four, or the name of another library.
_owners: dict[str, str] = {}
# Folders of installed packages that are the user's program all the same: `arraybridge trace -m package`.
_own: list[str] = []
# Name of a notebook's cell → the name of the file under which its source is known.
_cells: dict[str, str] = {}
#: Code without a file in which a user may write; all else in angle brackets is made by programs.
_TYPED_IN = ("<stdin>", "<string>", "<console>", "<ipython-input", "<python-input", "<doctest")


def site() -> Site:
    """The line of the user's own code in which this thread is: the innermost one that is no library's.

    Frameworks and Python's own library are looked through. Where none of the user's code is on the stack, it
    is where the work was handed out to this thread, and where that is not known the innermost foreign line.
    """
    frame: FrameType | None = sys._getframe(3)  # whoever asks has called three of ours
    library, known = "", _owners
    while frame is not None:
        file = frame.f_code.co_filename
        owner = known.get(file)
        if owner is None:
            owner = _owner(file)
        if owner == _OURS:
            library = ""  # what stands between two frames of ours was called by us
        elif owner == _USERS:
            return file, frame.f_code, frame.f_lasti, library
        elif owner == _CELL:
            return _cell(file), frame.f_code, frame.f_lasti, library
        elif owner != _PYTHON:
            library = library or owner
        frame = frame.f_back
    innermost, _ = outside()
    code = innermost.f_code
    return handed_out.get() or (code.co_filename, code, innermost.f_lasti, library)


def as_own(folder: str) -> None:
    """Count what lies in the folder as the user's code, although it is installed like a library."""
    _own.append(folder)
    _owners.clear()


def _owner(file: str) -> str:
    if len(_owners) > 4096:  # a notebook's cells, say
        _owners.clear()
    found = _classified(file)
    if found == _USERS and ("ipython" in file or "ipykernel" in file):
        found = _CELL
    _owners[file] = found
    return found


def _classified(file: str) -> str:
    if file.startswith(_HERE):
        return _OURS
    if file.startswith("<"):
        return _USERS if file.startswith(_TYPED_IN) else _PYTHON
    if any(file.startswith(folder) for folder in _own):
        return _USERS
    parts = file.replace("\\", "/").split("/")
    for folder in ("site-packages", "dist-packages"):
        if folder in parts[:-1]:
            library = parts[parts.index(folder) + 1].removesuffix(".py")
            return _PYTHON if library in _looked_through() else library
    import sysconfig

    python = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    return _PYTHON if any(file.startswith(folder + sep) for folder in python) else _USERS


def _looked_through() -> set[str]:
    packages = {"numpy", "optree", "IPython", "ipykernel"}
    for name in registry.framework_names():
        packages.update(registry.facts(name).packages)
    return packages


def _cell(file: str) -> str:
    """The cell of a notebook as its tracebacks call it, by now: run again, it has another number."""
    module = sys.modules.get("IPython")
    shell = None if module is None else module.get_ipython()
    named = None if shell is None else shell.compile.format_code_name(file)
    if named is None:
        return file
    cell = str(named[1])
    _cells[cell] = file
    return cell


def source_line(file: str, line: int) -> str:
    """The text of a line of code, without the blanks around it; ``""`` where it cannot be had."""
    import linecache

    return linecache.getline(_cells.get(file, file), line).strip()


# -- of which array ----------------------------------------------------------------------------------

_numbers = count()


class _Seen(weakref.ref[Any]):
    """An array that is known, and its number."""

    __slots__ = ("key", "number")

    key: int
    number: int


# Identity of an array that is alive → what is known of it.
_seen: dict[int, _Seen] = {}


def _forget(gone: _Seen) -> None:
    if _seen.get(gone.key) is gone:
        del _seen[gone.key]


# Where the memory of a NumPy array begins stands first in its C struct. It is read there, since
# ``__array_interface__`` takes longer than all the rest of an event.
_pointer, _HEAD = ctypes.c_void_p.from_address, object.__basicsize__


def same_array(x: Any) -> tuple[Any, ...] | None:
    """The same for the very same array as long as it lives; None where that cannot be told.

    Views of one NumPy array that look at the same elements in the same order are the same.
    """
    owner, ndarray = x, np.ndarray
    if type(x) is ndarray:
        while type(base := owner.base) is ndarray:
            owner = base
    found = _seen.get(id(owner))
    if found is None or found() is not owner:
        try:
            found = _Seen(owner, _forget)
        except TypeError:  # it takes no weak references
            return None
        found.key, found.number = id(owner), next(_numbers)
        _seen[found.key] = found
    if owner is x:
        return (found.number,)
    return (found.number, _pointer(id(x) + _HEAD).value, x.shape, x.strides)


def steps(source: Framework, x: Any) -> tuple[tuple[int, ...], tuple[int, ...], int] | None:
    """Shape, strides in bytes and bytes of an element, from which `layout` tells how it lies.

    None where the framework does not tell: a trace must not fail what it records.
    """
    if isinstance(x, np.ndarray):
        return x.shape, x.strides, x.itemsize
    try:
        shape = source.shape(x)
        return shape, source.strides(x), source.nbytes(x) // max(1, math.prod(shape))
    except (MemoryConversionError, TypeError, ValueError, AttributeError, RuntimeError):
        return None


def layout(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> str:
    """How the elements of an array lie in memory; see `Event.layout`."""
    if 0 in shape or is_c_contiguous(shape, strides, itemsize):
        return ""
    found = [(step, extent) for step, extent in zip(strides, shape, strict=True) if extent != 1]
    if any(step == 0 for step, _ in found):
        return "broadcast"
    if any(step < 0 for step, _ in found):
        return "reversed"
    return "sliced" if found == sorted(found, reverse=True) else "transposed"


def device_words(tree: Any) -> str:
    """The device of the first array in there, in words; ``""`` where there is none."""
    for leaf in leaves_of(tree):
        if (kinds.get(type(leaf)) or kind_of(leaf)) == ARRAY:
            owner, data = source_of(leaf)
            return str(owner.device_of(data))
    return ""
