"""Events of a trace, and the lines of the user's code that they belong to."""

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

#: The kinds of events that convert an array: by arraybridge, and by the frameworks' own calls.
CONVERSIONS = ("conversion", "foreign")


class Event(NamedTuple):
    """An event that was recorded while a trace was open.

    Attributes:
        kind: ``"conversion"`` by arraybridge; ``"foreign"``, a conversion by a framework's own call;
            ``"call"`` of a decorated function; ``"decision"`` of `gpu`; ``"stage"`` of a `Pipeline`;
            ``"item"`` of `device_map` or `prefetch`; ``"retry"``, ``"split"`` and ``"clean-up"`` of an
            out-of-memory recovery.
        name: The name of the function or stage; for a conversion, its frameworks, such as
            ``"numpy → jax"``, or the framework's own call, such as ``"jnp.asarray"``.
        start: The start, in seconds since the trace was opened.
        seconds: The duration measured by the calling thread; 0 for instantaneous events. GPU work that the
            event queued may finish later.
        thread: The name of the thread.
        device: The device, such as ``"gpu:0"``; ``""`` if unknown.
        file: The file of the user's code; ``"In[3]"`` in a notebook. In a worker thread, the file that
            submitted the work. In a library's thread without the user's code, the innermost file of a
            library.
        line: The line in ``file``.
        nbytes: The number of bytes that a conversion copied, summed over its copies, or that a clean-up
            freed; 0 for other events.
        reason: The reason for a conversion, a decision or a recovery step; or the error that ended a call.
        library: The other library that made the call from this line; ``""`` if the line made it directly.
        item: The number of the item or microbatch; None if the event does not belong to one.
        flow: An identifier that all events of one item share across the stages; or ``""``.
        thread_id: The identifier of the thread, which distinguishes threads of the same name.
        route: The route of a conversion by arraybridge, as in ``log.records``; None for other events.
        layout: The layout of a copied array: ``"transposed"``, ``"reversed"``, ``"broadcast"``,
            ``"sliced"``, or ``""`` if it is C-contiguous.
        array: A number that is equal for two copies of the same array; None if the array is unknown.
        source: The name of the source framework of a conversion; ``""`` for other events.
        target: The name of the target framework of a conversion; ``""`` for other events.
        code: The reason for a conversion as a `Reason`; None for other events.
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
        """Whether the line belongs to a library, in a thread that runs none of the user's code."""
        return bool(self.library) and _owners.get(self.file, _USERS) != _USERS

    @property
    def where(self) -> str:
        """The file and line, such as ``"train.py:12"``; relative if the file is in the working directory."""
        if not self.file:
            return "?"
        from pathlib import Path  # imported here, since it takes 3 ms

        path = Path(self.file)
        with suppress(ValueError, OSError):  # the file is elsewhere, or the working directory was deleted
            path = path.relative_to(Path.cwd())
        return f"{path}:{self.line}"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as strings and numbers that JSON can store."""
        fields = self._asdict()
        route, _, _ = (fields.pop(name) for name in ("route", "array", "thread_id"))
        return fields if route is None else {**fields, "method": route.method, "copies": route.copies}


def began(event: Event) -> tuple[float, float]:
    """Return the sort key that orders events by start, and the longest first if their starts are equal."""
    return event.start, -event.seconds


# -- the line of the user's code -----------------------------------------------------------------------

#: A line of the user's code: its file, the code object, the instruction in it, and the library that made the
#: call from there, or "". `line_of` finds the line number later, since that takes time.
Site = tuple[str, CodeType, int, str]


def line_of(site: Site) -> int:
    """Return the line number of a site."""
    _, code, at, _ = site
    for start, end, line in code.co_lines():
        if start <= at < end and line is not None:
            return line
    return code.co_firstlineno


#: The line that submitted the work of this thread, for worker threads without the user's code on the stack.
handed_out: ContextVar[Site | None] = ContextVar("arraybridge_handed_out", default=None)

_OURS, _USERS, _PYTHON = "arraybridge", "the user", "Python"
#: The library name for threads of Python's standard library.
_STANDARD = "Python"
_PACKAGE = dirname(dirname(__file__)) + sep  # noqa: PTH120  # pathlib costs 3 ms
# The owner of each file: `_OURS`, `_USERS`, `_PYTHON` (also for frameworks), or the name of another library.
_owners: dict[str, str] = new_cache()
# Folders of installed packages that count as the user's code, as in `arraybridge trace -m package`.
_own_folders: list[str] = []
# Name of a notebook cell → the file name under which `linecache` stores its source.
_cells: dict[str, str] = {}
#: Names of code that users type in; other names in angle brackets are generated code.
_TYPED_IN = ("<stdin>", "<string>", "<console>", "<ipython-input", "<python-input", "<doctest")


@overload
def site(frame: FrameType | None = None, *, foreign: Literal[False] = False) -> Site: ...
@overload
def site(frame: FrameType | None = None, *, foreign: bool) -> Site | None: ...
def site(frame: FrameType | None = None, *, foreign: bool = False) -> Site | None:
    """Return the innermost line of the user's code on the stack of this thread.

    If the stack does not contain the user's code, return the line that submitted the work of this thread. If
    there is no such line either, as in the threads of a library, return the innermost line of a library, a
    framework or Python's standard library, in this order.

    Args:
        frame: The frame to start from. Defaults to the caller.
        foreign: Whether the frame called a framework. The result is then None for calls by arraybridge
            itself, which are steps of its own conversions.
    """
    # Not this function's own frame: a frame that refers to itself keeps the objects of its callers alive.
    frame = frame or getattr(currentframe(), "f_back", None)
    first = frame
    library = ""
    while frame is not None:
        file = frame.f_code.co_filename
        owner = _owners.get(file) or _owner_of_new(file)
        if owner == _OURS:
            if foreign:
                return None
            library = ""  # arraybridge made the call, not the libraries between its frames
        elif owner == _USERS:
            return _notebook_cell(file), frame.f_code, frame.f_lasti, library
        elif owner != _PYTHON:
            library = library or owner
        frame = frame.f_back
    return handed_out.get() or _site_in_library(first)


def _rank(owner: str, installed: str) -> int:
    """Return the rank of a frame for describing a thread without the user's code; 0 is best."""
    if owner == _OURS:
        return 2
    return 0 if installed else 1


def _site_in_library(frame: FrameType | None) -> Site:
    """Return the innermost line of a library on a stack without the user's code; see `site`."""
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


def _user_line() -> tuple[str, int]:
    """Return the file and line of the user's code, for warnings."""
    here = site()
    return _cells.get(here[0], here[0]), line_of(here)


hooks.user_line = _user_line


def as_own(folder: str) -> None:
    """Count files in the folder as the user's code, even if they are installed like a library."""
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


def _notebook_cell(file: str) -> str:
    """Return a file name. For a notebook cell, return its name in tracebacks, such as ``"In[3]"``.

    That name changes when the cell runs again.
    """
    ipython: Any = sys.modules.get("IPython") if "ipython" in file or "ipykernel" in file else None
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


# -- the converted array -------------------------------------------------------------------------------

_numbers = count()
# For the id() of each live array: a weak reference to the array, and its number.
_seen: dict[int, tuple[weakref.ref[Any], int]] = {}


def same_array(x: Any) -> int | None:
    """Return a number that identifies an array during its lifetime; None if it has no weakref support."""
    key = id(x)
    seen = _seen.get(key)
    if seen is None or seen[0]() is not x:
        try:
            seen = weakref.ref(x, lambda _: _seen.pop(key, None)), next(_numbers)
        except TypeError:  # its class does not support weak references
            return None
        _seen[key] = seen
    return seen[1]


def wait_for(source: Framework, x: Any) -> None:
    """Wait for the pending computation of an array that is about to be read."""
    with suppress(Exception):  # if the computation failed or x is a tracer, reading x raises the same error
        source.interchange.block_until_ready(x)


def device_text(tree: Any) -> str:
    """Return the device string of the first array in a tree; ``""`` if there is none."""
    for leaf in leaves_of(tree):
        if is_array(leaf):
            owner, data = source_of(leaf)
            return str(owner.devices.device_of(data))
    return ""
