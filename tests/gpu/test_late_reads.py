"""Arrays that are read late, dropped early, and compared at the end.

A test that compares immediately waits for the GPU, and hides a missing wait. On the emulated GPU, queued
work does not run until something forces it, so the comparison at the end finds every such mistake.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import Pipeline, device_map, pinned, prefetch
from arraybridge.interface import keep_alives
from arraybridge.interface.streams import Streams
from tests.gpu import test_ordering
from tests.gpu.test_ordering import (
    GPU,
    NOTHING_SHOWN,
    ForeignDlpack,
    N,
    StreamlessFramework,
    _restore_streams,  # noqa: F401  # fixture: restores streams after each test
    _two_gpus,  # noqa: F401  # used by needs_two_gpus
    address_of,
    is_all,
    late,
    needs_two_gpus,
    overwrite,
    own_stream,
    side_stream,
)
from tests.helpers import EMULATED, registry_kept, require

pytestmark = pytest.mark.gpu


def new_streams() -> list[Any]:
    """Make a new stream the current one on both devices."""
    cupy = test_ordering.cupy
    streams = []
    for gpu in range(2):
        with cupy.cuda.Device(gpu):
            streams.append(side_stream())
    return streams


def late_pair(value: float) -> tuple[Any, Any]:
    """Return one array per device, whose values are produced by several queued kernels."""
    first = late(value)
    with test_ordering.cupy.cuda.Device(1):
        return first, late(value + 0.5)


def plus_zero(x: Any) -> Any:
    """Return a copy that waits in the current stream of the array's device."""
    with x.device:
        return x + 0


# -- results of other threads ---------------------------------------------------------------------------


def on_the_host() -> Iterator[np.ndarray]:
    for value in range(12):
        yield np.full(N, value, np.float32)


RECEIVED: dict[str, Any] = {
    "prefetch": lambda: prefetch(on_the_host(), "cupy", 0, depth=1),
    "device_map": lambda: device_map(late, map(float, range(12)), ["gpu:0"]),
    "Pipeline": lambda: Pipeline(arraybridge.cupy(gpu_id=0)(lambda x: x + 0)).map(on_the_host()),
}


@pytest.mark.parametrize("how", RECEIVED)
def test_received_arrays_stay_valid_until_the_reader_is_done(how: str) -> None:
    """Check that the creating thread reuses the memory only after this thread has read it."""
    test_ordering.cupy.get_default_memory_pool().free_all_blocks()
    reader = side_stream()
    copies = []
    for y in RECEIVED[how]():
        copies.append(y + 0)
        del y
    reader.synchronize()
    assert [is_all(copy, value) for value, copy in enumerate(copies)] == [True] * 12


def are_all(pairs: list[Any], values: list[float]) -> list[tuple[bool, bool]]:
    """Return whether all arrays of each pair equal a value, as `late_pair` made them."""
    return [(is_all(a, value), is_all(b, value + 0.5)) for value, (a, b) in zip(values, pairs, strict=True)]


VALUES = [float(value) for value in range(6)]
PAIRS: dict[str, Any] = {
    "device_map": lambda: device_map(late_pair, VALUES, ["gpu:0"]),
    "Pipeline": lambda: Pipeline(late_pair).map(VALUES),
}


@needs_two_gpus
@pytest.mark.parametrize("how", PAIRS)
def test_results_on_several_devices_synchronize_each_device(how: str) -> None:
    new_streams()
    copies = [[plus_zero(x) for x in pair] for pair in PAIRS[how]()]
    assert are_all(copies, VALUES) == [(True, True)] * len(VALUES)


@needs_two_gpus
def test_a_stage_waits_for_its_input_on_each_device() -> None:
    new_streams()
    streams = []  # keep-alive, since destroying a stream completes its work

    def make_on_own_streams(value: float) -> tuple[Any, Any]:
        streams.extend(new_streams())
        return late_pair(value)

    def copy_each(pair: tuple[Any, Any]) -> list[Any]:
        return [plus_zero(x) for x in pair]

    pairs = list(Pipeline(make_on_own_streams, copy_each).map(VALUES))
    assert are_all(pairs, VALUES) == [(True, True)] * len(VALUES)


@needs_two_gpus
def test_a_received_tensor_on_the_second_gpu_is_read_before_reuse() -> None:
    torch = require("torch")
    arraybridge.free_memory("torch")
    made, reader = torch.cuda.Stream(1), torch.cuda.Stream(1)
    with torch.cuda.stream(made):
        x = torch.empty(N, device="cuda:1")
        x.copy_(torch.full((N,), 3.0).pin_memory(), non_blocking=True)
    address = x.data_ptr()
    with torch.cuda.device(1):
        torch.cuda.set_stream(reader)
    torch.cuda.set_device(0)
    reader.wait_event(made.record_event())
    try:
        y = arraybridge.framework("torch").streams.take_over(x)
        with torch.cuda.stream(reader):
            z = y.clone()
        del x, y
        gc.collect()
        torch.cuda.default_stream(0).synchronize()  # a wrong stream that is done
        with torch.cuda.stream(made):
            again = torch.empty(N, device="cuda:1")
        assert EMULATED in ("", "at-once") or again.data_ptr() != address, "memory was reused before the read"
    finally:
        with torch.cuda.device(1):
            torch.cuda.set_stream(torch.cuda.default_stream(1))
        torch.cuda.set_device(0)
    torch.cuda.synchronize(1)
    assert z.cpu().tolist() == [3.0] * N


# -- arrays that threads read ---------------------------------------------------------------------------


@needs_two_gpus
def test_inputs_on_several_devices_stay_alive_until_read() -> None:
    """Check inputs whose source reuses their memory immediately, on separate streams."""
    cupy = test_ordering.cupy
    arraybridge.free_memory("cupy")
    made = [cupy.cuda.Stream(non_blocking=True)]
    with cupy.cuda.Device(1):
        made.append(cupy.cuda.Stream(non_blocking=True))
    addresses: list[int] = []

    def items() -> Iterator[Any]:
        pair = []
        for gpu, stream in enumerate(made):
            with cupy.cuda.Device(gpu):
                with stream:
                    pair.append(late(3))
                cupy.cuda.get_current_stream().wait_event(stream.record())
        addresses.extend(map(address_of, pair))
        yield pair

    def widen(pair: list[Any]) -> list[Any]:
        widened = []
        for x in pair:
            with x.device:
                widened.append(x.astype("float64"))
        return widened

    (results,) = Pipeline(widen).map(items())
    for thread in threading.enumerate():
        if thread.name.startswith("arraybridge-"):
            thread.join(600)
    gc.collect()
    for gpu, stream in enumerate(made):
        with cupy.cuda.Device(gpu):
            with stream:
                assert overwrite(addresses[gpu]), NOTHING_SHOWN
            stream.synchronize()
    assert [is_all(y, 3) for y in results] == [True, True]


def test_keep_alive_memory_is_dropped_only_after_the_read() -> None:
    """Check that dropping the keep-alive blocks until the reading work is done."""
    cupy = test_ordering.cupy
    cupy.get_default_memory_pool().free_all_blocks()
    made = side_stream()
    x = late(3)
    address = address_of(x)
    with own_stream("cupy") as reader:
        reader.wait_event(made.record())
        y = arraybridge.framework("cupy").interchange.import_from(
            ForeignDlpack(x), StreamlessFramework(), GPU
        )
        z = y + 0
        del x, y
        gc.collect()
    keep_alives.block_until_ready()
    gc.collect()
    with made:
        assert overwrite(address), NOTHING_SHOWN
    made.synchronize()
    reader.synchronize()
    assert is_all(z, 3)


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_views_keep_pinned_memory_alive(name: str) -> None:
    require(name)
    host = np.arange(N, dtype=np.float32)
    x = pinned(arraybridge.convert_memory(host, name))
    view = x[5:]
    del x
    gc.collect()
    others = [pinned(np.full(N, -1, np.float32)) for _ in range(8)]
    np.testing.assert_array_equal(arraybridge.to_numpy(view), host[5:])
    assert len(others) == 8


# -- two frameworks on one device -----------------------------------------------------------------------


@pytest.fixture
def twin() -> Iterator[Any]:
    """Register a second framework with separate streams during the test."""
    test_ordering.cupy = require("cupy")
    from tests.gpu.twin import TwinFramework

    with registry_kept():
        framework = TwinFramework()
        arraybridge.register(framework)
        yield framework


def test_prefetch_source_may_refill_its_buffer(twin: Any) -> None:
    """Check a source that synchronizes only its own stream, while the other framework reads in another
    stream.
    """
    with own_stream("cupy") as stream:
        buffer = test_ordering.cupy.empty(N, np.float32)

    def items() -> Iterator[Any]:
        for value in range(6):
            with stream:
                buffer.fill(value)
                stream.synchronize()
                yield buffer

    results = list(prefetch(items(), "twin", 0, dtype="float64", depth=9))
    assert [is_all(y, value) for value, y in enumerate(results)] == [True] * 6


def test_prefetch_source_of_another_framework_may_refill_its_buffer(twin: Any) -> None:
    from tests.gpu.twin import TwinArray

    stream = twin.streams.of(GPU)
    buffer = TwinArray(test_ordering.cupy.empty(N, np.float32), stream)

    def items() -> Iterator[Any]:
        for value in range(6):
            buffer.fill(value)
            stream.synchronize()
            yield buffer

    results = list(prefetch(items(), "cupy", 0, dtype="float64", depth=9))
    assert [is_all(y, value) for value, y in enumerate(results)] == [True] * 6


def test_prefetch_source_in_torch_may_refill_its_buffer() -> None:
    torch = require("torch")

    def items() -> Iterator[Any]:
        buffer = torch.empty(N, device="cuda:0")
        with own_stream("torch") as stream:
            for value in range(6):
                buffer.fill_(float(value))
                stream.synchronize()
                yield buffer

    results = list(prefetch(items(), "cupy", 0, copy=True, depth=9))
    assert [is_all(y, value) for value, y in enumerate(results)] == [True] * 6


# -- errors ---------------------------------------------------------------------------------------------


@needs_two_gpus
@pytest.mark.parametrize("name", ["cupy", "torch"])
def test_caller_waits_for_a_function_that_raises(name: str) -> None:
    """Check that the caller's stream waits for the work in the function's stream."""
    module = require(name)

    @arraybridge.framework(name).decorator(gpu_id=1)
    def write_and_raise(x: Any) -> None:
        if name == "cupy":
            for _ in range(4):
                x += 1
        else:
            x.copy_(module.full((N,), 4.0).pin_memory(), non_blocking=True)
        raise ValueError("raised in the function")

    device = arraybridge.Device("gpu", 1)
    own = arraybridge.framework(name)
    with own.devices.select(device), own_stream(name, 1):
        if name == "cupy":
            side_stream()  # a stream that was selected without a context manager
        caller = own.streams.handle(device)
        x = own.batching.empty((N,), "float32", device)
        x.fill(0) if name == "cupy" else x.fill_(0)
        with pytest.raises(ValueError, match="raised in the function"):
            write_and_raise(x)
        assert own.streams.handle(device) == caller
        assert is_all(x, 4)


@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_pinned_memory_is_not_reused_before_pytorch_has_copied_it(kind: str) -> None:
    """Check an asynchronous copy by PyTorch while CuPy is loaded, which does not wait for such copies."""
    torch = require("torch")
    require("cupy")
    arraybridge.free_memory()
    host = np.full(N, 3, np.float32)
    x = pinned(torch.from_numpy(host) if kind == "tensor" else host)
    with own_stream("torch") as stream:
        y = torch.as_tensor(x).to("cuda:0", non_blocking=True)
        del x
        gc.collect()
        others = [pinned(np.full(N, -1, np.float32)) for _ in range(4)]
        stream.synchronize()
        assert is_all(y, 3)
    assert len(others) == 4


# -- graphs that are captured ----------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["in the capture", "in another thread"])
@pytest.mark.parametrize("name", ["cupy", "torch"])
def test_imports_that_are_dropped_during_a_capture_do_not_disturb_it(name: str, where: str) -> None:
    """Check an import that is dropped, and the next import, which checks whether earlier ones were read."""
    module = require(name)
    cupy = test_ordering.cupy
    importer = arraybridge.framework(name).streams
    keep_alives.block_until_ready()
    # An event that the next import queries, and memory whose exporter waits for the importer in the end.
    keep_alives.keep_alive(late(1), Streams(), importer, GPU)
    exporter = test_ordering.Exporter(cupy.cuda.Stream(non_blocking=True))
    dropped = [keep_alives.keep_alive(late(2), exporter, importer, GPU)]
    x = late(3)
    cupy.cuda.Device().synchronize()

    def drop() -> None:
        dropped.clear()
        gc.collect()
        keep_alives.release()

    def elsewhere() -> None:
        thread = threading.Thread(target=drop)
        thread.start()
        thread.join()

    with own_stream(name) as stream:
        if name == "cupy":
            stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
            x += 1
            (drop if where == "in the capture" else elsewhere)()
            graph = stream.end_capture()
            graph.launch(stream)
        else:
            graph = module.cuda.CUDAGraph()
            y = arraybridge.to_torch(x)
            graph.capture_begin(capture_error_mode="global")
            y.fill_(4.0)
            (drop if where == "in the capture" else elsewhere)()
            graph.capture_end()
            graph.replay()
        stream.synchronize()
        assert is_all(x, 4)
    keep_alives.block_until_ready()  # raises for an event that was recorded during the capture
