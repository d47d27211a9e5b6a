"""The processes of ``processes=True``: a spawned one for each thread, which sends it items by a pipe."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from arraybridge.errors import MemoryConversionError, note_on, told
from arraybridge.frameworks import registry
from arraybridge.lines.devices import noting
from arraybridge.lines.exchange import Exchange
from arraybridge.lines.gradients import refuse_graphs
from arraybridge.lines.streams import ThreadStreams
from arraybridge.options import Settings, hold, in_force
from arraybridge.trees import arrays_of

__all__ = ["Process", "ProcessDiedError"]


class ProcessDiedError(MemoryConversionError, RuntimeError):
    """A process ended while it worked on an item."""


class Process:
    """Calls a function in a process of its own, for one thread.

    Args:
        job: a function of an item, which pickles.
        what: the functions of the user's in it, in words.
        name: for whom it works, in words.

    Raises:
        TypeError: the function does not pickle.
    """

    def __init__(self, job: Callable[[Any], Any], what: str, name: str) -> None:
        self.name = name
        self.exchange = Exchange()
        self.connection: Connection
        self.started: list[BaseProcess] = []
        try:
            self.job = self.exchange.dumps(job)
        except Exception as error:
            raise TypeError(
                f"processes=True sends the function to other processes, and {what} does not pickle"
                f" ({told(error)}); define it at the top of a module, and let setup= make what cannot be sent"
            ) from error

    def __call__(self, item: Any) -> Any:
        """The result for an item."""
        with noting(f"the item cannot be pickled, to be sent to the process for {self.name}"):
            data = self.exchange.dumps(item)
        try:
            self.connection.send_bytes(data)
            del data  # the process has it
            data = self.connection.recv_bytes()
        except (EOFError, OSError) as error:
            (process,) = self.started
            process.join(1)
            raise ProcessDiedError(
                f"the process for {self.name} ended at work, with exit code {process.exitcode};"
                " run the function on this item alone to see why"
            ) from error
        with noting(f"its result came from the process for {self.name}, and cannot be unpickled here"):
            is_result, answer = self.exchange.loads(data)
        if not is_result:
            raise _error_of(*answer)
        return answer

    @contextmanager
    def working(self, _: ThreadStreams) -> Iterator[None]:
        """Start the process, and end it in the end, whatever it does then."""
        spawn = multiprocessing.get_context("spawn")
        self.connection, other_end = spawn.Pipe()
        process = spawn.Process(target=serve, args=(other_end, self.name, in_force()), daemon=True)
        process.start()
        self.started.append(process)
        other_end.close()
        try:
            with suppress(OSError):  # it has died, as the first item finds out
                self.connection.send_bytes(self.job)
            yield
        finally:
            self.stop()
            process.join(1)
            self.connection.close()

    def stop(self) -> None:
        """End the process: the thread that waits for it sees the end of the pipe."""
        for process in self.started:
            process.terminate()


# -- in the process ----------------------------------------------------------------------------------


def serve(connection: Connection, name: str, settings: Settings) -> None:
    """What a process does: one item after the other, until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process
    exchange = Exchange()
    with hold(settings), suppress(EOFError, OSError):  # of the pipe: all others are answers
        refusal: tuple[Any, ...] = ()
        data = connection.recv_bytes()
        try:
            with noting(f"the function was sent to the process for {name}, and cannot be unpickled there"):
                job = exchange.loads(data)
        except BaseException as error:  # noqa: BLE001  # whatever it is, it is the caller's
            refusal = _failure(error)
        while True:
            data = connection.recv_bytes()
            answer = exchange.dumps((False, refusal)) if refusal else _answer(exchange, job, data, name)
            connection.send_bytes(answer)
            del answer, data


def _answer(exchange: Exchange, job: Callable[[Any], Any], data: bytes, name: str) -> bytes:
    """The result for a pickled item, or what was raised, as `Process` reads it."""
    try:
        with noting(f"the item was sent to the process for {name}, and cannot be unpickled there"):
            item = exchange.loads(data)
        result = job(item)
        del item
        for x in arrays_of(result):
            owner = registry.find_owner(x)
            if owner is not None:
                owner.settle(x)
        refuse_graphs(result)
        with noting(f"its result cannot be pickled, to leave the process for {name}"):
            return exchange.dumps((True, result))
    except BaseException as error:  # noqa: BLE001  # whatever it is, it is the caller's
        return exchange.dumps((False, _failure(error)))


def _failure(error: BaseException) -> tuple[Any, str, str]:
    """What `_error_of` takes: the error, its class and words, and the traceback of this process."""
    words, lines = told(error), "".join(traceback.format_exception(error)).rstrip()
    try:
        data = pickle.dumps(error)
    except Exception as why:  # noqa: BLE001  # what stands in its __reduce__ is unknown
        data = pickle.dumps(told(why))
    return data, words, lines


def _error_of(data: bytes, words: str, lines: str) -> BaseException:
    """The error as the caller raises it, with the traceback of the process as a note."""
    error: BaseException = RuntimeError(words)  # in place of one that does not travel
    try:
        answer = pickle.loads(data)  # noqa: S301  # made by our own process
    except Exception as why:  # noqa: BLE001  # some errors pickle, and do not come back
        answer = told(why)
    if isinstance(answer, BaseException):
        error = answer
    else:
        note_on(error, f"the error itself cannot leave its process ({answer})")
    note_on(error, lines)
    return error
