"""Every device-related method of a framework, called while another GPU is the current one.

``python -m tests.gpu.device_calls FRAMEWORK`` calls each method in a fresh process, with arrays on the
second GPU while the first is current, and prints an `Outcome` for each. `test_current_device.py` runs this.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

import arraybridge as ab
from arraybridge import cuda_driver
from arraybridge.carriers.third_party_arrays import FOREIGN_HOST
from arraybridge.interface import batching, component, interchange, runtime
from arraybridge.interface import devices as device_access
from arraybridge.interface import framework as base
from arraybridge.interface import memory as accelerator_memory
from arraybridge.interface.streams import Streams
from tests.gpu.forked import print_results_of_each

FIRST, SECOND = ab.Device("gpu", 0), ab.Device("gpu", 1)
VALUES = np.arange(6, dtype=np.float32).reshape(2, 3)


class Outcome(NamedTuple):
    """Effects of one call.

    Attributes:
        result: The device and the values of an array; anything else as the call returned it.
        current: The number of the framework's current device after the call.
        first_is_open: Whether the first GPU has a context after the call.
        pushed: Contexts of the driver that were pushed and not popped; 0 on a real GPU.
        kernel_is_missing: Whether the call needs a kernel that the emulated GPU cannot run.
    """

    result: Any
    current: int
    first_is_open: bool
    pushed: int
    kernel_is_missing: bool


class OfferedByInterface:
    """An array of an unknown library that exports ``__cuda_array_interface__``."""

    def __init__(self, array: Any) -> None:
        self._interface = array.__cuda_array_interface__

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return dict(self._interface)


class OfferedByDlpack:
    """An array of an unknown library that exports through DLPack."""

    def __init__(self, array: Any, device: int) -> None:
        self._array = array
        self._device = device

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self._device


class StreamlessInterchange(interchange.Interchange):
    dlpack_device = 2


class StreamlessFramework(ab.Framework):
    """A framework without streams that shares its GPU memory, such as JAX."""

    name = "lender"
    modules = ("tests",)
    interchange = component(StreamlessInterchange)

    def owns(self, x: Any) -> bool:
        return isinstance(x, OfferedByDlpack)


class Setup:
    """A framework with an array on the second GPU, and the first GPU as the current one."""

    def __init__(self, name: str) -> None:
        self.own = ab.framework(name)
        self.devices = self.own.devices
        self.interchange = self.own.interchange
        self.memory = self.own.memory
        self.batching = self.own.batching
        self.runtime = self.own.runtime
        self.streams = self.own.streams
        self.x = self.own.from_host(VALUES, SECOND)
        self.module = importlib.import_module(name)

    @property
    def offered(self) -> OfferedByDlpack:
        return OfferedByDlpack(self.x, SECOND.index)

    def current(self) -> int:
        """Return the current device of the framework."""
        if self.own.name == "torch":
            return int(self.module.cuda.current_device())
        return int(self.module.cuda.runtime.getDevice())

    def inside(self, context: AbstractContextManager[Any]) -> int:
        """Return the device that is current inside a context."""
        with context:
            return self.current()

    def new_stream(self) -> Any:
        """Return a stream of the second GPU."""
        with self.devices.select(SECOND):
            cuda = self.module.cuda
            return cuda.Stream() if self.own.name == "torch" else cuda.Stream(non_blocking=True)

    def handle_of(self, stream: Any) -> int:
        return int(stream.cuda_stream if self.own.name == "torch" else stream.ptr)


Call = Callable[[Setup], Any]


def _default_devices(s: Setup) -> list[str]:
    """Return the default device outside and inside of a device guard."""
    outside = str(s.devices.default_device())
    with s.devices.select(SECOND):
        return [outside, str(s.devices.default_device())]


def _native_device(s: Setup) -> str:
    return str(s.devices.read_device(s.devices.native_device(SECOND)))


def _error_inside(context: AbstractContextManager[Any]) -> str:
    """Raise an exception inside a context, and return its message."""
    try:
        with context:
            raise ValueError("raised inside")
    except ValueError as error:
        return str(error)


def _record_event(s: Setup) -> bool:
    event = s.streams.record_event(SECOND)
    assert event is not None
    event.wait()
    event.synchronize()
    return event.is_done()


def _handle_changes(s: Setup) -> bool:
    """Return whether `take_stream` changes this thread's stream on the second GPU and on no other."""
    streams = s.own.streams
    before = streams.handle(SECOND)
    streams.take_stream(SECOND)
    return streams.handle(SECOND) != before


def _wait_for(s: Setup) -> None:
    stream = s.new_stream()
    s.streams.wait_for(SECOND, s.handle_of(stream))


def _handle_is_of_the_second(s: Setup) -> bool:
    """Return whether the handle is that of the stream chosen on the second GPU."""
    stream = s.new_stream()
    with s.devices.select(SECOND):
        if s.own.name == "torch":
            s.module.cuda.set_stream(stream)
        else:
            stream.use()
    return s.streams.handle(SECOND) == s.handle_of(stream)


def _free_cache(s: Setup, device: ab.Device | None) -> bool:
    """Return whether the memory of a dropped array is freed."""
    s.batching.empty((1 << 20,), "float32", SECOND)
    return s.memory.free_cache(device) >= 4 << 20


def _used_memory(s: Setup) -> bool:
    memory = s.memory.device_memory(SECOND)
    return memory is not None and memory.free < memory.total


def _import_from(s: Setup, name: str) -> Any:
    """Import an array of the other framework."""
    other = ab.framework(name)
    # PyTorch leaves CUDA's current device, which CuPy shares, on the device of its last tensor.
    with s.devices.select(SECOND):
        x = other.from_host(VALUES, SECOND)
    return s.interchange.import_from(x, other, SECOND)


def _write(s: Any, x: Any) -> Any:
    out = s.own.from_host(np.zeros_like(VALUES), SECOND)
    s.own.write(out, x)
    return out


def _read_into(s: Any) -> list[Any]:
    view = np.zeros_like(VALUES)
    assert s.interchange.can_read_into(s.x, view)
    s.interchange.read_into(s.x, view)
    return view.tolist()


ARRAY: Any = ["gpu:1", VALUES.tolist()]
TWICE: Any = ["gpu:1", [*VALUES.tolist(), *VALUES.tolist()]]
FLAT: Any = ["gpu:1", VALUES.ravel().tolist()]
STACKED: Any = ["gpu:1", [VALUES.tolist()]]
ROWS: Any = ["gpu:1", VALUES[:1].tolist()]
#: The result is an array on the second GPU; its values are undefined.
ANY_VALUES: Any = ["gpu:1"]

#: Methods of `Framework` and of its components → calls with their expected results. If a method has several
#: calls, a description follows its name.
CALLS: dict[str, tuple[Call, Any]] = {
    "devices.accelerator": (lambda s: str(s.devices.accelerator(1)), "gpu:1"),
    "interchange.address": (lambda s: s.interchange.address(s.x) != 0, True),
    "interchange.import_from, from CuPy": (lambda s: _import_from(s, "cupy"), ARRAY),
    "interchange.import_from, from PyTorch": (lambda s: _import_from(s, "torch"), ARRAY),
    "interchange.import_from, from a framework without streams": (
        lambda s: s.interchange.import_from(s.offered, StreamlessFramework(), SECOND),
        ARRAY,
    ),
    "interchange.import_from, from an unknown library by DLPack": (
        lambda s: s.interchange.import_from(s.offered, FOREIGN_HOST, FIRST),
        ARRAY,
    ),
    "interchange.import_from, from an unknown library by the CUDA array interface": (
        lambda s: s.interchange.import_from(OfferedByInterface(s.x), FOREIGN_HOST, FIRST),
        ARRAY,
    ),
    "runtime.device_guard": (lambda s: s.inside(s.runtime.device_guard(s.x)), 1),
    "runtime.device_guard, left by an error": (
        lambda s: _error_inside(s.runtime.device_guard(s.x)),
        "raised inside",
    ),
    "runtime.observe": (lambda s: str(s.runtime.observe(s.x)[3]), "gpu:1"),
    "memory.device_memory": (_used_memory, True),
    "memory.device_details": (lambda s: bool(s.memory.device_details(SECOND)), True),
    "cast": (lambda s: s.own.cast(s.x, "float64"), ARRAY),
    "check": (lambda s: s.own.check(s.x), None),
    "interchange.check_castable": (lambda s: s.interchange.check_castable(s.x), None),
    "interchange.check_copy": (lambda s: s.interchange.check_copy(s.x), None),
    "devices.check_move": (lambda s: s.devices.check_move(s.x, SECOND), None),
    "batching.concatenate": (
        lambda s: s.batching.concatenate([s.x, s.x], 0),
        TWICE,
    ),
    "copy": (lambda s: s.own.copy(s.x), ARRAY),
    "devices.default_device": (_default_devices, None),
    "devices.device_of": (lambda s: str(s.devices.device_of(s.x)), "gpu:1"),
    "devices.available": (lambda s: SECOND in s.devices.available(), True),
    "dtype_name": (lambda s: s.own.dtype_name(s.x), "float32"),
    "batching.empty": (lambda s: s.batching.empty((2, 3), "float32", SECOND), ANY_VALUES),
    "interchange.export": (lambda s: s.interchange.export(s.x, SECOND), ARRAY),
    "devices.find_device": (lambda s: str(s.devices.find_device(SECOND)), "gpu:1"),
    "memory.free_cache": (lambda s: _free_cache(s, SECOND), True),
    "memory.free_cache, of all devices": (lambda s: _free_cache(s, None), True),
    "memory.free_memory_of": (lambda s: s.memory.free_memory_of(SECOND) > 0, True),
    "from_host": (lambda s: s.own.from_host(VALUES, SECOND), ARRAY),
    "write": (lambda s: _write(s, s.x), ARRAY),
    "write, from the host": (lambda s: _write(s, VALUES), ARRAY),
    "interchange.can_read_into": (lambda s: s.interchange.can_read_into(s.x, np.zeros_like(VALUES)), True),
    "interchange.read_into": (_read_into, VALUES.tolist()),
    "interchange.is_plain": (lambda s: s.interchange.is_plain(s.x), True),
    "interchange.normalize_bools": (lambda s: s.interchange.normalize_bools(s.x) is s.x, True),
    "devices.is_scattered": (lambda s: s.devices.is_scattered(s.x), False),
    "devices.is_started": (lambda s: s.devices.is_started(), True),
    "devices.starts_with_next_array": (lambda s: s.devices.starts_with_next_array(), False),
    "interchange.copy_reason": (lambda s: s.interchange.copy_reason(s.x), None),
    "devices.native_device": (_native_device, "gpu:1"),
    "nbytes": (lambda s: s.own.nbytes(s.x), 24),
    "owns": (lambda s: s.own.owns(s.x), True),
    "batching.slice_axis": (lambda s: s.batching.slice_axis(s.x, 0, 0, 1), ROWS),
    "memory.allocate_pinned": (lambda s: s.memory.allocate_pinned(64).shape, [64]),  # type: ignore[union-attr]
    "devices.read_device": (_native_device, "gpu:1"),
    "devices.replica": (lambda s: s.devices.replica(s.x, SECOND), None),
    "memory.reset_peak": (lambda s: s.memory.reset_peak(), None),
    "batching.reinterpret": (lambda s: s.batching.reinterpret(s.x, (6,), "float32"), FLAT),
    "batching.output_buffer": (lambda s: s.batching.output_buffer(s.x, (4, 3)), ANY_VALUES),
    "devices.select": (lambda s: s.inside(s.devices.select(SECOND)), 1),
    "devices.select, left by an error": (
        lambda s: _error_inside(s.devices.select(SECOND)),
        "raised inside",
    ),
    "interchange.block_until_ready": (lambda s: s.interchange.block_until_ready(s.x), None),
    "shape": (lambda s: s.own.shape(s.x), [2, 3]),
    "batching.stack": (lambda s: s.batching.stack([s.x]), STACKED),
    "interchange.strides": (lambda s: s.interchange.strides(s.x), [12, 4]),
    "memory.synchronize": (lambda s: s.memory.synchronize(), None),
    "devices.to_device": (lambda s: s.devices.to_device(s.x, SECOND), ARRAY),
    "to_host": (lambda s: s.own.to_host(s.x).tolist(), VALUES.tolist()),
    "batching.unstack": (lambda s: s.batching.unstack(s.x)[0], ["gpu:1", VALUES[0].tolist()]),
    "memory.usage": (lambda s: [row.device for row in s.memory.usage() if row.used], ["gpu:1"]),
    "devices.visible_devices": (lambda s: SECOND in s.devices.visible_devices(), True),
    "streams.handle": (_handle_is_of_the_second, True),
    "streams.record_event": (_record_event, True),
    "streams.stream": (lambda s: s.inside(s.streams.stream(SECOND)), 1),
    "streams.stream, left by an error": (
        lambda s: _error_inside(s.streams.stream(SECOND)),
        "raised inside",
    ),
    "streams.take_over": (lambda s: s.streams.take_over(s.x), ARRAY),
    "streams.take_stream": (_handle_changes, True),
    "streams.wait_for": (_wait_for, None),
}


def _error_of(call: Callable[[], object]) -> str:
    """Call a function that must raise, and return the name of the exception."""
    try:
        call()
    except Exception as error:  # noqa: BLE001  # each library raises its own exception type
        return type(error).__name__
    return "no error"


class Unwilling(OfferedByDlpack):
    """A producer whose export fails."""

    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("not now")


def _raise(x: Any) -> None:
    raise ValueError("raised in the function")


def _decorated(s: Setup, fn: Callable[[Any], object], x: Any) -> object:
    return s.own.decorator(gpu_id=1)(fn)(x)


def _take_too_much(s: Setup) -> Any:
    return s.batching.empty((1 << 45,), "float32", SECOND)


def _convert_too_much(s: Setup) -> Any:
    if s.own.name == "torch":  # the conversion would first allocate as much on the host
        return _take_too_much(s)
    return ab.convert_memory(np.broadcast_to(np.float32(1), (1 << 45,)), s.own.name, 1)


#: Calls that must raise on the second GPU → the name of the exception, or names by framework if they
#: differ.
ERRORS: dict[str, tuple[Call, Any]] = {
    "a function raises": (lambda s: _error_of(lambda: _decorated(s, _raise, s.x)), "ValueError"),
    "a function raises, with an array of the host": (
        lambda s: _error_of(lambda: _decorated(s, _raise, VALUES)),
        "ValueError",
    ),
    "memory runs out in a function": (
        lambda s: _error_of(lambda: _decorated(s, lambda x: _take_too_much(s), s.x)),
        "OutOfMemoryError",
    ),
    "memory runs out in a conversion": (
        lambda s: _error_of(lambda: _convert_too_much(s)),
        "OutOfMemoryError",
    ),
    "a cast does not exist": (
        lambda s: _error_of(lambda: s.own.cast(s.x, "nothing")),
        {"cupy": "TypeError", "torch": "KeyError"},
    ),
    "a producer refuses": (
        lambda s: _error_of(
            lambda: s.interchange.import_from(Unwilling(s.x, 1), StreamlessFramework(), SECOND)
        ),
        "BufferError",
    ),
    "an unknown producer refuses": (
        lambda s: _error_of(lambda: s.interchange.import_from(Unwilling(s.x, 1), FOREIGN_HOST, FIRST)),
        "BufferError",
    ),
    "a foreign array cannot be read": (
        lambda s: _error_of(lambda: ab.convert_memory(Unwilling(s.x, 1), s.own.name, 1)),
        "ArrayNotSupportedError",
    ),
}


#: Calls in which CuPy's from_dlpack calls cudaSetDevice (CuPy 14.2). To make the first GPU the current one
#: again, it has to be opened.
THROUGH_FROM_DLPACK = frozenset(
    {
        *("interchange.import_from, from CuPy", "interchange.import_from, from PyTorch"),
        "interchange.import_from, from a framework without streams",
        "interchange.import_from, from an unknown library by DLPack",
        *("a producer refuses", "an unknown producer refuses", "a foreign array cannot be read"),
    }
)

#: Methods that take neither a device nor an array on a device.
WITHOUT_DEVICE = frozenset(
    {
        *("cannot_view", "host_view", "supports"),
        *("devices.accelerators", "devices.has_accelerator", "devices.missing_device_reason"),
        *("fast_path.fast_types", "interchange.cannot_stride", "interchange.check_cast"),
        *(
            "batching.common_dtype",
            "interchange.fill",
            "interchange.nearest_shape",
            "interchange.record_write",
        ),
        *("memory.is_oom", "memory.is_oom_text", "memory.oom_error"),
        *("runtime.annotation", "runtime.array_classes", "runtime.array_namespace", "runtime.late_errors"),
        *("runtime.is_idle", "runtime.isolate", "runtime.narrows", "runtime.open_pytree"),
        *("runtime.pause_observation", "runtime.thread_settings", "runtime.x64_context"),
    }
)

#: Components of a framework by name, without `autodiff`, which uses the framework's own functions.
COMPONENTS = {
    "batching": batching.Batching,
    "devices": device_access.Devices,
    "fast_path": base.FastPath,
    "interchange": interchange.Interchange,
    "memory": accelerator_memory.Memory,
    "runtime": runtime.Runtime,
    "streams": Streams,
}


def methods() -> set[str]:
    """Return the names of all public methods of `Framework`, such as ``copy`` and ``devices.select``."""
    names = set(_methods_of(ab.Framework))
    for component_name, cls in COMPONENTS.items():
        names |= {f"{component_name}.{name}" for name in _methods_of(cls)}
    return names


def _methods_of(cls: type) -> list[str]:
    return [name for name in dir(cls) if not name.startswith("_") and inspect.isfunction(getattr(cls, name))]


def component_names() -> set[str]:
    """Return the names of the components that `Framework` has."""
    own = {name for name in dir(ab.Framework) if isinstance(getattr(ab.Framework, name), component)}
    return own | {"streams"}


def method_of(call: str) -> str:
    """Return the method that an entry of `CALLS` tests."""
    return call.partition(",")[0]


def expected(call: str, framework: str) -> Any:
    """Return the expected result of a call."""
    if call == "devices.default_device":
        # PyTorch's default is the CPU. CuPy does not support the CPU, so its default is the current GPU.
        return ["cpu", "cpu"] if framework == "torch" else ["gpu:0", "gpu:1"]
    if call == "runtime.device_guard" and framework == "torch":
        return 0  # PyTorch's functions run on the device of their tensors
    result = (CALLS | ERRORS)[call][1]
    return result[framework] if isinstance(result, dict) else result


def _pushed_contexts() -> int:
    if not os.environ.get("ARRAYBRIDGE_EMULATED_GPU"):
        return 0
    from tests.emulated_gpu import accounting

    return accounting.pushed_contexts()


def _outcome(name: str, call: Call, before: Callable[[], None]) -> Outcome:
    s = Setup(name)
    before()
    result: Any = None
    kernel_is_missing = False
    try:
        result = call(s)
    except RuntimeError as error:
        kernel_is_missing = "no kernel image is available" in str(error)
        if not kernel_is_missing:
            raise
    is_array = s.own.owns(result)
    current = s.current()
    first_is_open = cuda_driver.has_context(0)
    pushed = _pushed_contexts()
    if is_array:  # only now, since reading the values may open a device
        result = [str(s.devices.device_of(result)), s.own.to_host(result).tolist()]
    return Outcome(result, current, first_is_open, pushed, kernel_is_missing)


def _nothing() -> None:
    pass


def main(before: Callable[[], None] = _nothing) -> None:
    """Print the outcomes. ``before`` runs in each process after the array was created on the second GPU."""
    name = sys.argv[1]
    importlib.import_module(name)
    calls = {
        call: (lambda function=function: _outcome(name, function, before))
        for call, (function, _) in (CALLS | ERRORS).items()
    }
    print_results_of_each(calls)


if __name__ == "__main__":
    main()
