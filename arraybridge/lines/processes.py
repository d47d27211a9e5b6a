"""The processes of ``device_map(…, processes=True)``: a spawned one in place of each thread.

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
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from arraybridge.errors import GradientError, MemoryConversionError, note_on, told
from arraybridge.frameworks import registry
from arraybridge.lines.followed import refuse_graphs
from arraybridge.lines.line import Station
from arraybridge.lines.on_device import call_setup, move, own_framework, shown, working_on
from arraybridge.options import Settings, hold, in_force
from arraybridge.trees import arrays_of
from arraybridge.types import Device

__all__ = ["ProcessDiedError", "pickled_functions", "process_station"]


class ProcessDiedError(MemoryConversionError, RuntimeError):
    """A process of `device_map` ended while it worked on an item."""


def pickled_functions(fn: Callable[..., Any], setup: Callable[[], Any] | None) -> bytes:
    """The functions as they are sent to the processes, in one so that they may share an object.

    Raises:
        TypeError: one of them does not pickle.
    """
    try:
        return _pickled((fn, setup))
    except Exception as error:
        what = repr(fn) if setup is None else f"{fn!r} with setup={setup!r}"
        raise TypeError(
            f"processes=True sends the function to other processes, and {what} does not pickle"
            f" ({told(error)}); define it at the top of a module, and let setup= make what cannot be sent"
        ) from error


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        owner = None if isinstance(obj, type) else registry.find_owner(obj)
        if owner is None:
            return NotImplemented
        if owner.autodiff is not None and owner.autodiff.has_graph(obj):
            raise GradientError(
                f"an array of {owner.name} that is being differentiated does not go to another process, since"
                " its graph would stay behind: send it without, as x.detach()",
                source_type=owner.name,
                reason="a graph does not leave its process",
            )
        reduced = None if owner.pickling is None else owner.pickling.reduced(obj)
        return NotImplemented if reduced is None else reduced


def _pickled(x: Any) -> bytes:
    written = io.BytesIO()
    _Pickler(written, pickle.HIGHEST_PROTOCOL).dump(x)
    return written.getvalue()


@contextmanager
def _noting(note: str) -> Iterator[None]:
    """What pickling raises, which may run anybody's code, goes on and says what could not be sent."""
    try:
        yield
    except BaseException as error:
        note_on(error, note)
        raise


class _Worker:
    """A process, and the thread that sends it an item and waits for its result."""

    def __init__(self, functions: bytes, device: Device) -> None:
        self.functions = functions
        self.device = device
        self.end: Connection | None = None
        self.process: BaseProcess | None = None

    def work(self, item: Any) -> Any:
        end, process = self.end, self.process
        if end is None or process is None:  # closed while the thread was on its way here
            raise ProcessDiedError(f"the process for {self.device} has been ended")
        with _noting(f"the item cannot be pickled, to be sent to the process for {self.device}"):
            data = _pickled(item)
        try:
            end.send_bytes(data)
            del data  # the process has it
            data = end.recv_bytes()
        except (EOFError, OSError) as error:
            process.join(1)
            raise ProcessDiedError(
                f"the process for {self.device} ended at work, with exit code {process.exitcode};"
                " run the function on this item alone to see why"
            ) from error
        with _noting(f"its result came from the process for {self.device}, and cannot be unpickled here"):
            fine, answer = pickle.loads(data)  # noqa: S301  # made by our own process
        if not fine:
            raise _error_of(*answer)
        return answer

    @contextmanager
    def run(self) -> Iterator[None]:
        """Start the process, and end it in the end, whatever it does then."""
        spawn = multiprocessing.get_context("spawn")
        self.end, theirs = spawn.Pipe()
        self.process = spawn.Process(target=serve, args=(theirs, str(self.device), in_force()), daemon=True)
        self.process.start()
        theirs.close()
        try:
            with suppress(OSError):  # it has died, as the first item finds out
                self.end.send_bytes(self.functions)
            self.functions = b""
            yield
        finally:
            self.stop()
            self.process.join(1)
            self.end.close()

    def stop(self) -> None:
        """The thread that waits for the process sees the end of the connection."""
        if self.process is not None and self.process.pid is not None:
            self.process.terminate()


def process_station(
    fn: Callable[..., Any], chosen: list[Device], setup: Callable[[], Any] | None = None
) -> Station:
    """A station of `device_map` with a process in place of each thread's work.

    Raises:
        TypeError: a function does not pickle.
    """
    functions = pickled_functions(fn, setup)
    workers = [_Worker(functions, device) for device in chosen]

    def stop() -> None:
        for worker in workers:
            worker.stop()

    return Station(
        [worker.work for worker in workers],
        len(chosen),
        lambda number, w: f"item {number}, on {chosen[w]}",
        lambda w, _: workers[w].run(),
        stop=stop,
        shown=shown(fn, chosen),
    )


# -- in the process ----------------------------------------------------------------------------------


def serve(connection: Connection, words: str, settings: Settings) -> None:
    """What a process does: one item after the other, until the connection ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process
    with hold(settings), suppress(EOFError, OSError):  # of the connection: all others are answers
        job = _Job(Device.parse(words), connection.recv_bytes())
        while True:
            connection.send_bytes(job.answer(connection.recv_bytes()))


class _Job:
    """What a process makes of each item. Its answers keep nothing but what ``setup`` made."""

    def __init__(self, device: Device, functions: bytes) -> None:
        self.device = device
        self.made: list[Any] = []
        self.refusal: bytes | None = None
        try:
            with _noting(f"the function was sent to the process for {device}, and cannot be unpickled there"):
                self.fn, self.setup = pickle.loads(functions)  # noqa: S301  # made by our own process
            self.framework = own_framework(self.fn)  # imported before the first item comes
        except BaseException as error:  # noqa: BLE001  # whatever it is, it is the caller's
            self.refusal = _pickled_error(error)

    def answer(self, data: bytes) -> bytes:
        """The result for a pickled item, or what it raised, as `_Worker.work` reads it."""
        if self.refusal is not None:
            return self.refusal
        try:
            with _noting(
                f"the item was sent to the process for {self.device}, and cannot be unpickled there"
            ):
                item = pickle.loads(data)  # noqa: S301  # made by our own process
            del data
            # For each item anew: the item may have brought its framework.
            with working_on(self.device):
                if self.setup is not None and not self.made:
                    self.made.append(call_setup(self.setup, self.device))
                result = self.fn(*self.made, item if self.framework is not None else move(item, self.device))
                del item
                refuse_graphs(result)
                for x in arrays_of(result):
                    owner = registry.find_owner(x)
                    if owner is not None:
                        owner.settle(x)
            with _noting(f"its result cannot be pickled, to leave the process for {self.device}"):
                return _pickled((True, result))
        except BaseException as error:  # noqa: BLE001  # whatever it is, it is the caller's
            return _pickled_error(error)


# -- errors on their way -----------------------------------------------------------------------------


def _pickled_error(error: BaseException) -> bytes:
    """What `_error_of` takes: the error, its class and words, and the traceback of this process."""
    words, trace = told(error), "".join(traceback.format_exception(error)).rstrip()
    try:
        data = _pickled(error)
    except Exception as why:  # noqa: BLE001  # what stands in its __reduce__ is unknown
        data = pickle.dumps(_stand_in(words, why))
    return pickle.dumps((False, (data, words, trace)))


def _error_of(data: bytes, words: str, trace: str) -> BaseException:
    """The error as the parent raises it, with the traceback of the process as a note."""
    error: BaseException
    try:
        error = pickle.loads(data)  # noqa: S301  # made by our own process
        if not isinstance(error, BaseException):
            raise TypeError(f"a {type(error).__name__} comes out of its pickle")
    except Exception as why:  # noqa: BLE001  # some errors pickle, and do not come back
        error = _stand_in(words, why)
    note_on(error, trace)
    return error


def _stand_in(words: str, why: Exception) -> RuntimeError:
    """For an error that does not travel."""
    error = RuntimeError(words)
    note_on(
        error, f"the error itself cannot leave its process ({told(why)}): these are its class and its words"
    )
    return error
