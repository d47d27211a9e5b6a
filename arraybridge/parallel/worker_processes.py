"""The processes of ``processes=True``: a spawned one for each thread, which sends it items by a pipe."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from arraybridge.errors import MemoryConversionError, note_on, told
from arraybridge.frameworks import registry
from arraybridge.memory import serialization
from arraybridge.memory.shared_memory import Exchange
from arraybridge.parallel.workers import Work, Worker, attempt, noting
from arraybridge.settings import MissingGpu, missing_gpu, settings
from arraybridge.trees import arrays_of

__all__ = ["ProcessDiedError"]


class ProcessDiedError(MemoryConversionError, RuntimeError):
    """A worker process ended while it processed an item.

    Also a ``RuntimeError``. A note names the item. Process it alone to see the cause::

        fn(items[3])  # in the main process
    """


class WorkerProcess:
    """The process in which a worker's function runs; the thread of the worker sends it items.

    Args:
        make: makes the function of an item, there; it pickles.
        what: the user's functions in it, for messages.
        name: for whom it works, for messages.

    Raises:
        TypeError: the function does not pickle.
    """

    def __init__(self, make: Callable[[], Work], what: str, name: str) -> None:
        self._name = name
        self._exchange = Exchange()
        self._started: BaseProcess | None = None
        job = attempt(serialization.dumps, make, self._exchange)
        if job.error is not None:
            raise TypeError(
                f"processes=True sends the function to other processes, and {what} does not pickle"
                f" ({told(job.error)}); define it at the top of a module, and let setup= make what cannot"
                " be sent"
            ) from job.error
        self._job: bytes = job.value

    @contextmanager
    def working(self, _: Worker) -> Iterator[Work]:
        """Start the process, and end it in the end, whatever it does then."""
        spawn = multiprocessing.get_context("spawn")
        connection, other_end = spawn.Pipe()
        process = spawn.Process(target=serve, args=(other_end, self._name, missing_gpu()), daemon=True)
        process.start()
        self._started = process
        other_end.close()
        try:
            with suppress(OSError):  # it has died, as the first item finds out
                connection.send_bytes(self._job)
            yield partial(self._result_of, process, connection)
        finally:
            self.stop()
            process.join(1)
            connection.close()

    def stop(self) -> None:
        """End the process; the thread that waits for it sees the end of the pipe."""
        if self._started is not None:
            self._started.terminate()

    def _result_of(self, process: BaseProcess, connection: Connection, item: Any) -> Any:
        """Return what the process makes of an item, or raise what it raises."""
        with noting(f"the item cannot be pickled, to be sent to the process for {self._name}"):
            data = serialization.dumps(item, self._exchange)
        try:
            connection.send_bytes(data)
            del data  # the process has it
            data = connection.recv_bytes()
        except (EOFError, OSError) as error:
            process.join(1)
            raise ProcessDiedError(
                f"the process for {self._name} ended at work, with exit code {process.exitcode};"
                " run the function on this item alone to see why"
            ) from error
        with noting(f"its result came from the process for {self._name}, and cannot be unpickled here"):
            answer = serialization.loads(data, self._exchange)
        if isinstance(answer, _Failure):
            raise answer.error()
        return answer.value


# -- in the process ----------------------------------------------------------------------------------


def serve(connection: Connection, name: str, missing: MissingGpu) -> None:
    """What a process does: one item after the other, until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process
    exchange = Exchange()

    def made(data: bytes) -> Work:
        make: Callable[[], Work] = unpickled("the function", data)
        return make()

    def unpickled(what: str, data: bytes) -> Any:
        with noting(f"{what} was sent to the process for {name}, and cannot be unpickled there"):
            return serialization.loads(data, exchange)

    def answer(data: bytes) -> bytes:
        result = work(unpickled("the item", data))
        for x in arrays_of(result):
            owner = registry.find_owner(x)
            if owner is not None:
                owner.interchange.settle(x)
        with noting(f"its result cannot be pickled, to leave the process for {name}"):
            return serialization.dumps(_Result(result), exchange)

    with settings(missing_gpu=missing), suppress(EOFError, OSError):  # of the pipe: all others are answers
        job = attempt(made, connection.recv_bytes())
        work: Work = job.value
        while True:
            data = connection.recv_bytes()
            outcome = attempt(answer, data) if job.error is None else job
            if outcome.error is None:
                connection.send_bytes(outcome.value)
            else:
                connection.send_bytes(serialization.dumps(_Failure.of(outcome.error), exchange))
            del data, outcome


# -- what a process sends back -------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Result:
    """The result for an item."""

    value: Any


@dataclass(slots=True, eq=False)
class _Failure:
    """The exception that was raised at an item.

    Attributes:
        pickled: The exception, or the reason why it cannot be pickled, as text.
        text: Its class and message.
        traceback: The traceback of its process, as text.
    """

    pickled: bytes
    text: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> _Failure:
        pickled = attempt(pickle.dumps, error)  # what stands in its __reduce__ is unknown
        data = pickled.value if pickled.error is None else pickle.dumps(told(pickled.error))
        return cls(data, told(error), "".join(traceback.format_exception(error)).rstrip())

    def error(self) -> BaseException:
        """Return the exception for the caller to raise, with the traceback of its process as a note."""
        loaded = attempt(pickle.loads, self.pickled)  # some errors pickle, and cannot be unpickled
        if isinstance(loaded.value, BaseException):
            error = loaded.value
        else:
            error = RuntimeError(self.text)
            why = loaded.value if loaded.error is None else told(loaded.error)
            note_on(error, f"the error itself cannot leave its process ({why})")
        note_on(error, self.traceback)
        return error
