"""The processes of ``device_map(…, processes=True)``: an executor of one spawned process a thread.

All that travels is bytes of Python's own pickle, made and read apart from sending them: so what cannot be
pickled is told from a process that has died. The pickler of multiprocessing would move the memory of torch
tensors to where other processes reach it, from under the arrays of NumPy and JAX that share it.
"""

from __future__ import annotations

import io
import multiprocessing
import pickle
import signal
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from arraybridge.conversion.convert import convert_memory
from arraybridge.errors import MemoryConversionError, note_on, told
from arraybridge.frameworks import registry
from arraybridge.lines.followed import refuse_graphs
from arraybridge.lines.lanes import Lane
from arraybridge.lines.on_device import Job, noting, working_on
from arraybridge.lines.shared import shared
from arraybridge.options import Settings, hold, in_force
from arraybridge.trees import arrays_of
from arraybridge.types import Device

__all__ = ["ProcessDiedError", "process_jobs"]

# Bytes from which on an array goes by shared memory.
_LARGE = 1 << 20


class ProcessDiedError(MemoryConversionError, RuntimeError):
    """A process of `device_map` ended while it worked on an item."""


def process_jobs(fn: Callable[..., Any], setup: Callable[[], Any] | None, chosen: list[Device]) -> list[Any]:
    """What the threads of `device_map` do in place of the work.

    Raises:
        TypeError: a function does not pickle.
    """
    try:
        functions, _ = _pickled((fn, setup))  # in one, so that they may share an object
    except Exception as error:
        what = repr(fn) if setup is None else f"{fn!r} with setup={setup!r}"
        raise TypeError(
            f"processes=True sends the function to other processes, and {what} does not pickle"
            f" ({told(error)}); define it at the top of a module, and let setup= make what cannot be sent"
        ) from error
    return [_Process(functions, device) for device in chosen]


class _Process:
    """A process for a thread, which sends it an item and waits for its result."""

    def __init__(self, functions: bytes, device: Device) -> None:
        self.functions, self.device = functions, device
        self.pool: ProcessPoolExecutor | None = None

    @contextmanager
    def working(self, _: Lane) -> Iterator[None]:
        """Have the process while the thread works."""
        arguments = str(self.device), in_force(), self.functions
        spawn = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(1, spawn, initializer=_begin, initargs=arguments)
        try:
            yield
        finally:
            self.pool.shutdown(wait=False)  # it takes its time to end

    def __call__(self, item: Any) -> Any:
        assert self.pool is not None  # noqa: S101
        with noting(f"the item cannot be pickled, to be sent to the process for {self.device}"):
            data, kept = _pickled(item)
        try:
            data = self.pool.submit(_answer, data).result()
        except BrokenProcessPool as error:
            raise ProcessDiedError(
                f"the process for {self.device} ended at work; run the function on this item alone to see why"
            ) from error
        del kept  # the shared memory of the item, until the process has it
        with noting(f"its result came from the process for {self.device}, and cannot be unpickled here"):
            fine, answer = pickle.loads(data)  # noqa: S301  # made by our own process
        if not fine:
            raise _error_of(*answer)
        return answer


# -- what travels ------------------------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    """Sends large arrays on the host by shared memory, which lives as long as somebody keeps ``kept``."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.kept: list[Any] = []

    def reducer_override(self, obj: Any) -> Any:
        owner = None if isinstance(obj, type) else registry.find_owner(obj)
        if owner is None:
            return NotImplemented
        refuse_graphs(obj)
        if self._is_large(owner, obj):
            self.kept.append(shared(obj))
            return _received, (owner.name, self.kept[-1])
        reduced = owner.pickling.reduced(obj)
        return NotImplemented if reduced is None else reduced

    def _is_large(self, owner: Any, x: Any) -> bool:
        if isinstance(x, np.ndarray):
            return type(x) is np.ndarray and x.nbytes > _LARGE and x.dtype.kind in "biufc"
        if not owner.has_host or owner.nbytes(x) <= _LARGE or not owner.pickling.is_plain(x):
            return False
        return owner.device_of(x).kind == "cpu" and not getattr(x, "requires_grad", False)


def _received(name: str, x: Any) -> Any:
    plain = x.view(np.ndarray)
    return plain if name == "numpy" else convert_memory(plain, name, device="cpu")


def _pickled(x: Any) -> tuple[bytes, list[Any]]:
    """The bytes, and what has to be kept until they are read."""
    written = io.BytesIO()
    pickler = _Pickler(written)
    pickler.dump(x)
    return written.getvalue(), pickler.kept


# -- in the process ----------------------------------------------------------------------------------


class _Own:
    """What the process has: its job, or why it has none, and the memory of its last result.

    Whoever sends the next item has read that.
    """

    device: Device
    job: Job
    settings = ExitStack()
    refusal: bytes | None = None
    kept: Any = None


def _begin(words: str, settings: Settings, functions: bytes) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends this process without a word
    _Own.device = Device.parse(words)
    _Own.settings.enter_context(hold(settings))  # as long as the process lives
    try:
        with noting(f"the function was sent to the process for {words}, and cannot be unpickled there"):
            fn, setup = pickle.loads(functions)  # noqa: S301  # made by our own process
        _Own.job = Job(fn, setup, _Own.device)
    except BaseException as error:  # noqa: BLE001  # whatever it is, it is the caller's
        _Own.refusal = _failure(error)


def _answer(data: bytes) -> bytes:
    """The result for a pickled item, or what it raised, as `_Process` reads it."""
    if _Own.refusal is not None:
        return _Own.refusal
    words = str(_Own.device)
    try:
        with noting(f"the item was sent to the process for {words}, and cannot be unpickled there"):
            item = pickle.loads(data)  # noqa: S301  # made by our own process
        with working_on(_Own.device):  # for each item anew: it may bring its framework
            _Own.job.prepare()
            result = _Own.job(item)
            for x in arrays_of(result):
                owner = registry.find_owner(x)
                if owner is not None:
                    owner.settle(x)
        refuse_graphs(result)
        with noting(f"its result cannot be pickled, to leave the process for {words}"):
            answer, _Own.kept = _pickled((True, result))
        return answer
    except BaseException as error:  # noqa: BLE001  # whatever it is, it is the caller's
        return _failure(error)


# -- errors on their way -----------------------------------------------------------------------------


def _failure(error: BaseException) -> bytes:
    """What `_error_of` takes: the error, its class and words, and the traceback of this process."""
    words, lines = told(error), "".join(traceback.format_exception(error)).rstrip()
    try:
        data, _ = _pickled(error)
    except Exception as why:  # noqa: BLE001  # what stands in its __reduce__ is unknown
        data = pickle.dumps(_stand_in(words, why))
    return pickle.dumps((False, (data, words, lines)))


def _error_of(data: bytes, words: str, lines: str) -> BaseException:
    """The error as the caller raises it, with the traceback of the process as a note."""
    try:
        error = pickle.loads(data)  # noqa: S301  # made by our own process
        if not isinstance(error, BaseException):
            raise TypeError(f"a {type(error).__name__} comes out of its pickle")
    except Exception as why:  # noqa: BLE001  # some errors pickle, and do not come back
        error = _stand_in(words, why)
    note_on(error, lines)
    return error


def _stand_in(words: str, why: Exception) -> RuntimeError:
    """For an error that does not travel."""
    error = RuntimeError(words)
    note_on(
        error, f"the error itself cannot leave its process ({told(why)}): these are its class and its words"
    )
    return error
