"""The processes of ``device_map(…, processes=True)``: a spawned one in place of each thread."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from arraybridge.frameworks import registry
from arraybridge.lines.device_map import move, working_on
from arraybridge.lines.line import Station, arrays_of
from arraybridge.types import Device

__all__ = ["ProcessDiedError", "ProcessStation", "check_picklable"]


class ProcessDiedError(RuntimeError):
    """A process of `device_map` ended while it worked on an item."""


def check_picklable(fn: Any) -> None:
    """Refuse a function that cannot be sent to another process.

    Raises:
        TypeError: it does not pickle.
    """
    try:
        pickle.dumps(fn)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise TypeError(
            f"processes=True sends the function to other processes, and {fn!r} does not pickle ({error});"
            " define it at the top of a module"
        ) from error


class ProcessStation(Station):
    """One thread a process; the thread sends an item, and waits for its result."""

    def __init__(self, fn: Callable[[Any], Any], chosen: list[Device]) -> None:
        spawn = multiprocessing.get_context("spawn")
        ends: list[Connection | None] = [None] * len(chosen)
        made: list[Any] = [None] * len(chosen)

        def worker(w: int) -> Callable[[Any], Any]:
            def work(sent: tuple[Any, Any]) -> tuple[Any, list[Any]]:
                end, process = ends[w], made[w]
                if end is None:  # closed while the thread was on its way here
                    raise ProcessDiedError(f"the process for {chosen[w]} has been ended")
                try:
                    end.send(sent[0])
                    fine, answer = end.recv()
                except (EOFError, OSError) as error:
                    process.join(1)
                    raise ProcessDiedError(
                        f"the process for {chosen[w]} ended at work, with exit code {process.exitcode};"
                        " run the function on this item alone to see why"
                    ) from error
                if not fine:
                    raise answer
                return answer, []

            return work

        @contextmanager
        def enter(w: int) -> Iterator[None]:
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=serve, args=(theirs, fn, str(chosen[w])), daemon=True)
            process.start()
            theirs.close()
            ends[w], made[w] = ours, process
            try:
                yield
            finally:
                self.end(w)

        self._ends, self._made = ends, made
        super().__init__(
            [worker(w) for w in range(len(chosen))],
            len(chosen),
            lambda number, w: f"item {number}, on {chosen[w]}",
            enter,
        )

    def end(self, w: int) -> None:
        """End a process, whatever it does."""
        process, connection = self._made[w], self._ends[w]
        if process is not None:
            process.terminate()
            process.join(1)
        if connection is not None:
            connection.close()

    def stop(self) -> None:
        for process in self._made:
            if process is not None:
                process.terminate()  # the thread that waits for it sees the end of the connection


def serve(connection: Connection, fn: Callable[[Any], Any], words: str) -> None:
    """What a process does: one item after the other, until the connection ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process
    device = Device.parse(words)
    decorated = hasattr(fn, "gpu_id") and hasattr(fn, "execution_memory_type")
    if decorated:
        registry.framework(fn.execution_memory_type)  # type: ignore[attr-defined]
    while True:
        try:
            item = connection.recv()
        except (EOFError, OSError):
            return
        try:
            # For each item anew: the item may have brought its framework.
            with working_on(device):
                answer = fn(item if decorated else move(item, device))
                for x in arrays_of(answer):
                    owner = registry.find_owner(x)
                    if owner is not None:
                        owner.finish(x)
            sent = (True, answer)
            data = pickle.dumps(sent)
        except BaseException as error:  # noqa: BLE001  # whatever it is, it is the caller's
            data = _pickled_error(error)
        connection.send_bytes(data)


def _pickled_error(error: BaseException) -> bytes:
    """The error as the parent is to raise it, with the traceback of this process as a note."""
    error.add_note("".join(traceback.format_exception(error)).rstrip())
    try:
        data = pickle.dumps((False, error))
        pickle.loads(data)  # noqa: S301  # made a line above; some errors pickle, and do not come back
    except (pickle.PicklingError, TypeError, AttributeError, ValueError):
        plain = RuntimeError(f"{type(error).__name__}: {error}")
        plain.__notes__ = list(error.__notes__)
        data = pickle.dumps((False, plain))
    return data
