"""One thing that happened while a trace was open, and the line of the user's code that it belongs to."""

from __future__ import annotations

import sys
import weakref
from contextlib import suppress
from contextvars import ContextVar
from inspect import currentframe
from itertools import count
from os.path import dirname, sep
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

from arraybridge.carriers.sources import is_array, source_of
from arraybridge.frameworks import registry
from arraybridge.frameworks.base import Framework
from arraybridge.reasons import Reason
from arraybridge.tracing.memory_layouts import Steps, layout, steps
from arraybridge.trees import leaves_of
from arraybridge.types import hooks, new_cache, remember

if TYPE_CHECKING:
    from arraybridge.tracing.route import Route

__all__ = [
    "Event",
    "Steps",
    "as_own",
    "began",
    "device_text",
    "handed_out",
    "layout",
    "line_of",
    "same_array",
    "site",
    "steps",
    "wait_for",
]

#: The kinds of events that move an array: ours, and those of the frameworks' own calls.
CONVERSIONS = ("conversion", "foreign")


class Event(NamedTuple):
    """One thing that happened while a trace was open.

    Attributes:
        kind: ``"conversion"``; ``"foreign"``, one by a framework's own call; ``"call"`` of a decorated
            function; ``"decision"`` of `gpu`; ``"stage"`` of a `Pipeline`; ``"item"`` of `device_map` or
            `prefetch`; ``"retry"`` and ``"split"`` of a recovery, and its ``"clean-up"``.
        name: the function, the stage, ``"numpy → jax"``, or the framework's call, ``"jnp.asarray"``.
        start: seconds since the trace was opened.
        seconds: how long it took, as its thread saw it; 0 for what has no length. What is queued on a card
            may go on after that.
        thread: name of the thread.
        device: where, in words; ``""`` where it is not known.
        file, line: of the user's own code. In a worker thread, where the work was handed out; in a library's
            thread without the user's code, the innermost line of a library; in a notebook, ``"In[3]"`` stands
            for the file.
        nbytes: bytes that a conversion copied, each copy counted, or that a clean-up freed; else 0.
        reason: why, in words: of a conversion, of a decision, of a step of a recovery; or the error that
            ended a call.
        library: the other library that made the call from there; ``""`` where the line did so itself.
        item: number of the item or microbatch; None for what belongs to none.
        flow: the same word for all events of one item on its way through the stages; or ``""``.
        thread_id: number of the thread, for threads of one name.
        route: of a conversion of ours, as in ``log.records``; else None.
        layout: of the array that was copied: ``"transposed"``, ``"reversed"``, ``"broadcast"``, ``"sliced"``,
            or ``""`` where it lies in order.
        array: the same for two copies of the very same array; None where that cannot be told.
        source, target: names of the frameworks of a conversion; else ``""``.
        code: the reason of a conversion as a `Reason`; else None.
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
    array: int | None = None
    source: str = ""
    target: str = ""
    code: Reason | None = None

    @property
    def in_library(self) -> bool:
        """Whether the line is a library's own, in one of its threads that runs none of the user's code."""
        return bool(self.library) and _owners.get(self.file, _USERS) != _USERS

    @property
    def where(self) -> str:
        """File and line, ``"train.py:12"``; files below the working directory without the way there."""
        if not self.file:
            return "?"
        from pathlib import Path  # costs 3 ms, which `import arraybridge` saves

        path = Path(self.file)
        with suppress(ValueError, OSError):  # it lies elsewhere; or the working directory is gone
            path = path.relative_to(Path.cwd())
        return f"{path}:{self.line}"

    def to_dict(self) -> dict[str, Any]:
        """Plain strings and numbers, ready for JSON."""
        fields = self._asdict()
        route, _, _ = (fields.pop(name) for name in ("route", "array", "thread_id"))
        return fields if route is None else {**fields, "method": route.method, "copies": route.copies}


def began(event: Event) -> tuple[float, float]:
    """What events are sorted by: their start, and where that is the same the longest first."""
    return event.start, -event.seconds


# -- the line of the user's code -----------------------------------------------------------------------

#: A line of the user's code: its file, the code and the instruction in it, and the other library in between,
#: if any. `line_of` finds the line itself when somebody asks, since that takes time.
Site = tuple[str, CodeType, int, str]


def line_of(site: Site) -> int:
    """The number of the line."""
    _, code, at, _ = site
    for start, end, line in code.co_lines():
        if start <= at < end and line is not None:
            return line
    return code.co_firstlineno


#: Where the work of this thread was handed out, for lines of a worker thread in which no code of the user is.
handed_out: ContextVar[Site | None] = ContextVar("arraybridge_handed_out", default=None)

_OURS, _USERS, _PYTHON = "arraybridge", "the user", "Python"
#: What the threads of Python's own library are listed under.
_STANDARD = "Python"
_PACKAGE = dirname(dirname(__file__)) + sep  # noqa: PTH120  # pathlib costs 3 ms
# File of a function → whose it is: one of the three, or the name of another library.
_owners: dict[str, str] = new_cache()
# Folders of installed packages that are the user's program all the same: `arraybridge trace -m package`.
_own_folders: list[str] = []
# Name of a notebook's cell → the name of the file under which its source is known.
_cells: dict[str, str] = {}
#: Code without a file in which a user may write; all else in angle brackets is made by programs.
_TYPED_IN = ("<stdin>", "<string>", "<console>", "<ipython-input", "<python-input", "<doctest")


@overload
def site(frame: FrameType | None = None, *, foreign: Literal[False] = False) -> Site: ...
@overload
def site(frame: FrameType | None = None, *, foreign: bool) -> Site | None: ...
def site(frame: FrameType | None = None, *, foreign: bool = False) -> Site | None:
    """The line of the user's own code in which this thread is: the innermost one that is no library's.

    Frameworks and Python's own library are looked through. If none of the user's code is on the stack, it is
    where the work was handed out to this thread. A thread of a library has neither: it is the innermost line
    of a library there, of a framework if there is no other, and of Python's own library if there is none.

    Args:
        frame: where to begin; None: here.
        foreign: the frame has called a framework. Where one of ours comes first, the call was a
            step of ours, and there is no line.
    """
    # Never this function's own frame: a frame that refers to itself keeps the iterators of its callers.
    frame = frame or getattr(currentframe(), "f_back", None)
    first = frame
    library = ""
    while frame is not None:
        file = frame.f_code.co_filename
        owner = _owners.get(file) or _owner_of_new(file)
        if owner == _OURS:
            if foreign:
                return None
            library = ""  # what stands between two frames of ours was called by us
        elif owner == _USERS:
            return _cell(file), frame.f_code, frame.f_lasti, library
        elif owner != _PYTHON:
            library = library or owner
        frame = frame.f_back
    return handed_out.get() or _site_in_library(first)


def _rank(owner: str, installed: str) -> int:
    """Return how well a frame describes a thread without the user's code; 0 is best."""
    if owner == _OURS:
        return 2
    return 0 if installed else 1


def _site_in_library(frame: FrameType | None) -> Site:
    """Return the innermost line of a library on a stack without code of the user."""
    ranked: dict[int, tuple[FrameType, str]] = {}
    while frame is not None:
        file = frame.f_code.co_filename
        owner = _owners.get(file) or _owner_of_new(file)
        if owner not in (_OURS, _PYTHON):
            return file, frame.f_code, frame.f_lasti, owner
        installed = "" if owner == _OURS else _installed_as(file)
        rank = _rank(owner, installed)
        ranked.setdefault(rank, (frame, installed or _STANDARD))
        frame = frame.f_back
    found, library = ranked[min(ranked)]
    return found.f_code.co_filename, found.f_code, found.f_lasti, library


def _place() -> tuple[str, int]:
    """File and line of the user's code, where a warning points."""
    here = site()
    return _cells.get(here[0], here[0]), line_of(here)


hooks.user_line = _place


def as_own(folder: str) -> None:
    """Count what lies in the folder as the user's code, although it is installed like a library."""
    _own_folders.append(folder)
    _owners.clear()


def _owner_of_new(file: str) -> str:
    return remember(_owners, file, _owner_of(file))


def _owner_of(file: str) -> str:
    if file.startswith(_PACKAGE):
        return _OURS
    if file.startswith("<"):
        return _USERS if file.startswith(_TYPED_IN) else _PYTHON
    if file.startswith(tuple(_own_folders)):
        return _USERS
    library = _installed_as(file)
    if library:
        of_frameworks = (registry.metadata_of(name).packages for name in registry.framework_names())
        examined = {"numpy", "optree", "IPython", "ipykernel"}.union(*of_frameworks)
        return _PYTHON if library in examined else library
    import sysconfig

    python = (sysconfig.get_path(name) + sep for name in ("stdlib", "platstdlib"))
    return _PYTHON if file.startswith(tuple(python)) else _USERS


def _installed_as(file: str) -> str:
    """Return the name of the installed package that a file belongs to; ``""`` if it belongs to none."""
    *folders, last = file.replace("\\", "/").split("/")
    for installed in {"site-packages", "dist-packages"}.intersection(folders):
        return [*folders, last][folders.index(installed) + 1].removesuffix(".py")
    return ""


def _cell(file: str) -> str:
    """A notebook's cell as its tracebacks call it, by now, since one that runs again has another number."""
    ipython: Any = sys.modules.get("IPython") if "ipython" in file or "ipykernel" in file else None
    shell = ipython and ipython.get_ipython()
    words = shell and shell.compile.format_code_name(file)
    if not words:
        return file
    _cells[words[1]] = file
    return str(words[1])


def source_line(file: str, line: int) -> str:
    """The text of a line of code, without the blanks around it; ``""`` where it cannot be had."""
    import linecache

    return linecache.getline(_cells.get(file, file), line).strip()


# -- the array -----------------------------------------------------------------------------------------

_numbers = count()
# Identity of an array that is alive → a reference to it, and its number.
_seen: dict[int, tuple[weakref.ref[Any], int]] = {}


def same_array(x: Any) -> int | None:
    """The same for the very same array as long as it lives; None where that cannot be told."""
    key = id(x)
    seen = _seen.get(key)
    if seen is None or seen[0]() is not x:
        try:
            seen = weakref.ref(x, lambda _: _seen.pop(key, None)), next(_numbers)
        except TypeError:  # it takes no weak references
            return None
        _seen[key] = seen
    return seen[1]


def wait_for(source: Framework, x: Any) -> None:
    """Wait for the pending computation of an array that is about to be read."""
    with suppress(Exception):  # of the computation, or x is traced: reading it raises the same
        source.interchange.block_until_ready(x)


def device_text(tree: Any) -> str:
    """The device of the first array in there, in words; ``""`` where there is none."""
    for leaf in leaves_of(tree):
        if is_array(leaf):
            owner, data = source_of(leaf)
            return str(owner.devices.device_of(data))
    return ""
