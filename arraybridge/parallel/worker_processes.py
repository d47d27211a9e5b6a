"""Worker processes for ``processes=True``: one spawned process per thread, connected by a pipe."""

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

from arraybridge.errors import MemoryConversionError, error_text, note_on
from arraybridge.memory import serialization
from arraybridge.memory.segments import Exchange
from arraybridge.outcome import Outcome, attempt
from arraybridge.parallel.streams_between_threads import block_until_ready
from arraybridge.parallel.workers import Work, Worker, noting
from arraybridge.settings import MissingGpu, missing_gpu, settings

__all__ = ["ProcessDiedError"]


class ProcessDiedError(MemoryConversionError, RuntimeError):
    """A worker process ended while it processed an item.

    Also a ``RuntimeError``. A note names the item. Process it alone to see the cause::

        fn(items[3])  # in the main process
    """


class WorkerProcess:
    """The process that runs a worker's function on the items that the worker's thread sends.

    Args:
        make: A picklable function that the process calls once. It returns the function to call with each
            item.
        what: The user's functions as text, for messages.
        name: The device or stage that the process belongs to, for messages.

    Raises:
        TypeError: The function is not picklable.
    """

    def __init__(self, make: Callable[[], Work], what: str, name: str) -> None:
        self._name = name
        self._exchange = Exchange()
        self._started: BaseProcess | None = None
        job = attempt(serialization.dumps, make, self._exchange)
        if job.error is not None:
            raise TypeError(
                f"processes=True sends the function to other processes, but {what} does not pickle"
                f" ({error_text(job.error)}). Define it at the top level of a module, and create objects that"
                " do not pickle in setup=."
            ) from job.error
        self._job: bytes = job.value

    @contextmanager
    def working(self, _: Worker) -> Iterator[Work]:
        """Start the process, yield the function that sends it an item, and terminate it at the end."""
        spawn = multiprocessing.get_context("spawn")
        connection, other_end = spawn.Pipe()
        process = spawn.Process(target=serve, args=(other_end, self._name, missing_gpu()), daemon=True)
        process.start()
        self._started = process
        other_end.close()
        try:
            with suppress(OSError):  # if the process has died, the first item raises `ProcessDiedError`
                connection.send_bytes(self._job)
            yield partial(self._result_of, process, connection)
        finally:
            self.stop()
            process.join(1)
            connection.close()

    def stop(self) -> None:
        """Terminate the process. A thread that is waiting for a result gets EOFError from the pipe."""
        if self._started is not None:
            self._started.terminate()

    def _result_of(self, process: BaseProcess, connection: Connection, item: Any) -> Any:
        """Send an item to the process. Return its result, or raise the exception that it sends back."""
        with noting(f"the item cannot be pickled for the process of {self._name}"):
            data = serialization.dumps(item, self._exchange)
        try:
            connection.send_bytes(data)
            del data  # the process has received the item
            data = connection.recv_bytes()
        except (EOFError, OSError) as error:
            process.join(1)
            raise ProcessDiedError(
                f"The process of {self._name} ended with exit code {process.exitcode} while it processed this"
                " item. Call the function on this item in the main process to see why."
            ) from error
        with noting(f"the result of the process of {self._name} cannot be unpickled here"):
            answer = serialization.loads(data, self._exchange)
        if isinstance(answer, _Failure):
            raise answer.error()
        return answer.value  # an `Outcome`


# -- in the process ----------------------------------------------------------------------------------


def serve(connection: Connection, name: str, missing: MissingGpu) -> None:
    """Process items in a worker process until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and terminates this process
    exchange = Exchange()

    def make_work(data: bytes) -> Work:
        make: Callable[[], Work] = unpickle("the function", data)
        return make()

    def unpickle(what: str, data: bytes) -> Any:
        with noting(f"{what} cannot be unpickled in the process of {name}"):
            return serialization.loads(data, exchange)

    def answer(data: bytes) -> bytes:
        result = work(unpickle("the item", data))
        block_until_ready(result)
        with noting(f"the result cannot be pickled in the process of {name}"):
            return serialization.dumps(Outcome(result), exchange)

    # The pipe raises the suppressed exceptions when it is closed. All other exceptions are sent back.
    with settings(missing_gpu=missing), suppress(EOFError, OSError):
        job = attempt(make_work, connection.recv_bytes())
        work: Work = job.value
        while True:
            data = connection.recv_bytes()
            outcome = attempt(answer, data) if job.error is None else job
            if outcome.error is None:
                connection.send_bytes(outcome.value)
            else:
                connection.send_bytes(serialization.dumps(_Failure.of(outcome.error), exchange))
            del data, outcome


# -- failures in a process ---------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Failure:
    """A message with the exception that was raised for an item.

    Attributes:
        pickled: The pickled exception, or, if it cannot be pickled, a pickled string with the reason.
        text: The class and message of the exception.
        traceback: The traceback in the worker process, as text.
    """

    pickled: bytes
    text: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> _Failure:
        pickled = attempt(pickle.dumps, error)  # __reduce__ of a third-party class may raise anything
        data = pickled.value if pickled.error is None else pickle.dumps(error_text(pickled.error))
        return cls(data, error_text(error), "".join(traceback.format_exception(error)).rstrip())

    def error(self) -> BaseException:
        """Return the exception for the caller to raise, with the traceback from the process as a note."""
        loaded = attempt(pickle.loads, self.pickled)  # some exceptions can be pickled but not unpickled
        if isinstance(loaded.value, BaseException):
            error = loaded.value
        else:
            error = RuntimeError(self.text)
            why = loaded.value if loaded.error is None else error_text(loaded.error)
            note_on(error, f"the original exception cannot be pickled and unpickled ({why})")
        note_on(error, self.traceback)
        return error
