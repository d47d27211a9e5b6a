"""The processes of ``processes=True``: a spawned one for each thread, which sends it items by a pipe."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from arraybridge.errors import MemoryConversionError, note_on, told
from arraybridge.frameworks import registry
from arraybridge.lines.threads import Enter, Work, Worker, attempt, noting
from arraybridge.memory import frames
from arraybridge.memory.shared import Exchange
from arraybridge.options import MissingGpu, missing_gpu, settings
from arraybridge.trees import arrays_of

__all__ = ["ProcessDiedError"]


class ProcessDiedError(MemoryConversionError, RuntimeError):
    """A process ended while it worked on an item."""


def in_process(make: Callable[[], Work], what: str, name: str) -> tuple[Enter, Callable[[], object]]:
    """What a thread works in that has a process of its own do the work; and what ends that process.

    Args:
        make: gives the function of an item, there; it pickles.
        what: the functions of the user's in it, in words.
        name: for whom it works, in words.

    Raises:
        TypeError: the function does not pickle.
    """
    exchange = Exchange()
    job, error = attempt(frames.dumps, make, exchange)
    if error is not None:
        raise TypeError(
            f"processes=True sends the function to other processes, and {what} does not pickle"
            f" ({told(error)}); define it at the top of a module, and let setup= make what cannot be sent"
        ) from error
    started: list[BaseProcess] = []

    def stop() -> None:
        for process in started:
            process.terminate()  # the thread that waits for it sees the end of the pipe

    @contextmanager
    def working(_: Worker) -> Iterator[Work]:
        """Start the process, and end it in the end, whatever it does then."""
        spawn = multiprocessing.get_context("spawn")
        connection, other_end = spawn.Pipe()
        process = spawn.Process(target=serve, args=(other_end, name, missing_gpu()), daemon=True)
        process.start()
        started.append(process)
        other_end.close()
        try:
            with suppress(OSError):  # it has died, as the first item finds out
                connection.send_bytes(job)
            yield partial(_result, process, connection, exchange, name)
        finally:
            stop()
            process.join(1)
            connection.close()

    return working, stop


def _result(process: BaseProcess, connection: Connection, exchange: Exchange, name: str, item: Any) -> Any:
    """What the process makes of an item."""
    with noting(f"the item cannot be pickled, to be sent to the process for {name}"):
        data = frames.dumps(item, exchange)
    try:
        connection.send_bytes(data)
        del data  # the process has it
        data = connection.recv_bytes()
    except (EOFError, OSError) as error:
        process.join(1)
        raise ProcessDiedError(
            f"the process for {name} ended at work, with exit code {process.exitcode};"
            " run the function on this item alone to see why"
        ) from error
    with noting(f"its result came from the process for {name}, and cannot be unpickled here"):
        is_result, answer = frames.loads(data, exchange)
    if not is_result:
        raise _error_of(*answer)
    return answer


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
            return frames.loads(data, exchange)

    def answer(data: bytes) -> bytes:
        result = job(unpickled("the item", data))
        for x in arrays_of(result):
            owner = registry.find_owner(x)
            if owner is not None:
                owner.interchange.settle(x)
        with noting(f"its result cannot be pickled, to leave the process for {name}"):
            return frames.dumps((True, result), exchange)

    with settings(missing_gpu=missing), suppress(EOFError, OSError):  # of the pipe: all others are answers
        job, refusal = attempt(made, connection.recv_bytes())
        while True:
            data = connection.recv_bytes()
            sent, error = (b"", refusal) if refusal is not None else attempt(answer, data)
            connection.send_bytes(sent if error is None else frames.dumps((False, _failure(error)), exchange))
            del data, sent, error


def _failure(error: BaseException) -> tuple[Any, str, str]:
    """What `_error_of` takes: the error, its class and words, and the traceback of this process."""
    words, lines = told(error), "".join(traceback.format_exception(error)).rstrip()
    data, why = attempt(pickle.dumps, error)  # what stands in its __reduce__ is unknown
    return data if why is None else pickle.dumps(told(why)), words, lines


def _error_of(data: bytes, words: str, lines: str) -> BaseException:
    """The error as the caller raises it, with the traceback of the process as a note."""
    answer, why = attempt(pickle.loads, data)  # some errors pickle, and do not come back
    error = answer if isinstance(answer, BaseException) else RuntimeError(words)
    if error is not answer:
        note_on(error, f"the error itself cannot leave its process ({answer if why is None else told(why)})")
    note_on(error, lines)
    return error
