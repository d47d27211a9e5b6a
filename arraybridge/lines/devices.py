"""Working for one device: this thread's default there, and the arrays of an item brought to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from arraybridge.arrays import source_of
from arraybridge.conversion.convert import convert_memory
from arraybridge.errors import DeviceNotFoundError, note_on
from arraybridge.frameworks import registry
from arraybridge.frameworks.base import Framework, visible_devices
from arraybridge.frameworks.registry import loaded
from arraybridge.lines.streams import ThreadStreams
from arraybridge.options import busy_workers, default_device, worker_device
from arraybridge.placement import placement
from arraybridge.trees import map_arrays
from arraybridge.types import Device

__all__ = ["working_on"]


class noting:  # noqa: N801  # a context manager that is called as a function
    """What is raised, whatever it is, goes on with a note."""

    def __init__(self, note: str) -> None:
        self.note = note

    def __enter__(self) -> None:
        pass

    def __exit__(self, cls: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            note_on(error, self.note)


def own_framework(fn: Any) -> Framework | None:
    """The framework of a decorated function; None where arrays reach the function as they are."""
    placed = placement(fn)
    if placed is None or placed.framework is None or not placed.converts:
        return None
    return registry.framework(placed.framework)


@contextmanager
def working_on(device: Device, streams: ThreadStreams | None = None) -> Iterator[None]:
    """Make the device the one of this thread: for decorated functions, and the current one of frameworks."""
    with ExitStack() as stack:
        for variable in (worker_device, default_device):
            stack.callback(variable.reset, variable.set(device))
        busy_workers.append(device)
        stack.callback(busy_workers.remove, device)
        # pyclesperanto selects devices for the whole process, and gets them by argument alone.
        for framework in loaded() if device.kind != "opencl" else ():
            if framework.name != "pyclesperanto" and device in visible_devices(framework):
                if streams is not None:
                    streams.use_stream(framework.streams, device)
                stack.enter_context(framework.selected(device))
        yield


class Job:
    """The function of `device_map` in one worker, with what ``setup`` makes there."""

    def __init__(self, fn: Callable[..., Any], setup: Callable[[], Any] | None, device: Device) -> None:
        self.fn, self.setup, self.device = fn, setup, device
        # A decorated function brings its arrays to the device by itself, from any framework.
        self.decorated = own_framework(fn) is not None
        self.made: tuple[Any, ...] = ()

    def prepare(self) -> None:
        """Call ``setup``, once."""
        if self.setup is not None and not self.made:
            with noting(f"in setup, on {self.device}"):
                self.made = (self.setup(),)

    def __call__(self, item: Any) -> Any:
        """The result for an item, in the thread that is `working`."""
        return self.fn(*self.made, item if self.decorated else move(item, self.device))

    def alone(self, item: Any) -> Any:
        """The result for an item, in a process that does nothing else; the item may bring its framework."""
        with working_on(self.device):
            self.prepare()
            return self(item)

    @contextmanager
    def working(self, streams: ThreadStreams) -> Iterator[None]:
        """Work in this thread; what ``setup`` made goes in the end."""
        with working_on(self.device, streams):
            self.prepare()
            try:
                yield
            finally:
                self.made = ()


def move(item: Any, device: Device) -> Any:
    """The item with its arrays on the device, each in its own framework; NumPy's stay on the host."""

    def place(x: Any) -> Any:
        source, array = source_of(x)
        if source.name == "numpy":
            return x
        gathered = not source.pool.is_scattered(array)
        if gathered and source.device_of(array) == device:
            return x
        try:
            return convert_memory(x, source.name, device=device)
        except DeviceNotFoundError as error:
            note_on(
                error,
                f"device_map moves arrays within their framework, and {source.name} has no {device};"
                " pass devices= that it has, or decorate the function for the framework that it is to run in",
            )
            raise

    return map_arrays(item, place)
