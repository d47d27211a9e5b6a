"""The processes of ``device_map(…, processes=True)``: a spawned one in place of each thread."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from arraybridge.errors import MemoryConversionError, text_of
from arraybridge.frameworks import registry
from arraybridge.lines.followed import refuse_graphs
from arraybridge.lines.line import Station
from arraybridge.lines.on_device import call_setup, move, own_framework, shown, working_on
from arraybridge.trees import arrays_of
from arraybridge.types import Device

__all__ = ["ProcessDiedError", "check_picklable", "process_station"]


class ProcessDiedError(MemoryConversionError, RuntimeError):
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


class _Worker:
    """A process, and the thread that sends it an item and waits for its result."""

    def __init__(self, fn: Callable[..., Any], device: Device, setup: Callable[[], Any] | None) -> None:
        self.fn = fn
        self.setup = setup
        self.device = device
        self.end: Connection | None = None
        self.process: BaseProcess | None = None

    def work(self, item: Any) -> Any:
        end, process = self.end, self.process
        if end is None or process is None:  # closed while the thread was on its way here
            raise ProcessDiedError(f"the process for {self.device} has been ended")
        try:
            end.send(item)
            fine, answer = end.recv()
        except (EOFError, OSError) as error:
            process.join(1)
            raise ProcessDiedError(
                f"the process for {self.device} ended at work, with exit code {process.exitcode};"
                " run the function on this item alone to see why"
            ) from error
        if not fine:
            raise answer
        return answer

    @contextmanager
    def run(self) -> Iterator[None]:
        """Start the process, and end it in the end, whatever it does then."""
        spawn = multiprocessing.get_context("spawn")
        self.end, theirs = spawn.Pipe()
        self.process = spawn.Process(
            target=serve, args=(theirs, self.fn, str(self.device), self.setup), daemon=True
        )
        self.process.start()
        theirs.close()
        try:
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
    """A station of `device_map` with a process in place of each thread's work."""
    workers = [_Worker(fn, device, setup) for device in chosen]

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


def serve(
    connection: Connection, fn: Callable[..., Any], words: str, setup: Callable[[], Any] | None
) -> None:
    """What a process does: one item after the other, until the connection ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process
    device = Device.parse(words)
    framework = own_framework(fn)  # imported before the first item comes
    made: list[Any] = []
    while True:
        try:
            item = connection.recv()
        except (EOFError, OSError):
            return
        try:
            # For each item anew: the item may have brought its framework.
            with working_on(device):
                if setup is not None and not made:
                    made.append(call_setup(setup, device))
                answer = fn(*made, item if framework is not None else move(item, device))
                refuse_graphs(answer)
                for x in arrays_of(answer):
                    owner = registry.find_owner(x)
                    if owner is not None:
                        owner.settle(x)
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
        words = text_of(error)
        plain = RuntimeError(type(error).__name__ if words is None else f"{type(error).__name__}: {words}")
        plain.__notes__ = list(error.__notes__)
        data = pickle.dumps((False, plain))
    return data
