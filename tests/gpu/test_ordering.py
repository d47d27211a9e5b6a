"""Stream ordering: sources that are deleted early, copies between GPUs, and user streams.

On a real GPU, a missing wait rarely shows. On the emulated GPU (`tox -e emulated-gpu`), it always does:
queued work does not run until something forces it.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import Pipeline, device_map, prefetch
from arraybridge.carriers.third_party_arrays import FOREIGN_HOST
from arraybridge.device import Device
from arraybridge.interface import keep_alives
from arraybridge.interface.component import component
from arraybridge.interface.interchange import Interchange
from arraybridge.interface.streams import Streams
from arraybridge.reasons import Reason
from tests.helpers import EMULATED, needs_kernels_of, output_of, registry_kept, require, require_two_gpus

pytestmark = pytest.mark.gpu

N = 1 << 12
GPU = Device("gpu", 0)
NOTHING_SHOWN = "the next array did not reuse the memory, so the test proves nothing"

cupy: Any = None  # imported with the first test, not at collection
of_each_framework = pytest.mark.parametrize("name", ["cupy", "torch"])


@pytest.fixture(autouse=True)
def _restore_streams() -> Iterator[None]:
    """Restore the current streams and empty all queues after the test."""
    global cupy
    cupy = require("cupy")
    try:
        yield
    finally:
        for gpu in range(cupy.cuda.runtime.getDeviceCount()):
            with cupy.cuda.Device(gpu):
                cupy.cuda.Stream.null.use()
                cupy.cuda.Device(gpu).synchronize()


@pytest.fixture
def _two_gpus() -> None:
    require_two_gpus()


needs_two_gpus = pytest.mark.usefixtures("_two_gpus")


def side_stream() -> Any:
    """Create a stream on the current GPU, make it CuPy's current stream, and return it."""
    stream = cupy.cuda.Stream(non_blocking=True)
    stream.use()
    return stream


@contextmanager
def own_stream(name: str, gpu: int = 0) -> Iterator[Any]:
    """Return a new stream of the GPU that is the framework's current one inside the context."""
    if name == "cupy":
        with cupy.cuda.Stream(non_blocking=True) as stream:
            yield stream
    else:
        torch = require("torch")
        with torch.cuda.stream(torch.cuda.Stream(gpu)):
            yield torch.cuda.current_stream(gpu)


def late(value: float, count: int = N) -> Any:
    """Return an array whose values are produced by several kernels that wait in the current stream."""
    x = cupy.zeros(count, np.float32)
    for _ in range(4):
        x += value / 4
    return x


def late_array_of(name: str, value: float, gpu: int = 0) -> Any:
    """Return an array like `late`; for PyTorch a copy from pinned memory, which needs no compiled kernel."""
    if name == "cupy":
        return late(value)
    torch = require("torch")
    x = torch.empty(N, device=f"cuda:{gpu}")
    x.copy_(torch.full((N,), float(value)).pin_memory(), non_blocking=True)
    return x


def overwrite(address: int, name: str = "cupy") -> bool:
    """Allocate the memory that was freed last, write to it, and return whether it is at that address."""
    if name == "cupy":
        x = cupy.empty(N, np.float32)
        x.fill(-1)
    else:
        x = require("torch").empty(N, device="cuda:0")
        x.fill_(-1.0)
    return address_of(x) == address


def address_of(x: Any) -> int:
    address: int = arraybridge.framework(arraybridge.detect_memory_type(x)).interchange.address(x)
    return address


def copy_of(x: Any) -> Any:
    """Return a copy that waits in the current stream of its framework."""
    return x.clone() if hasattr(x, "clone") else x.copy()


def is_all(x: Any, value: float) -> bool:
    return bool((arraybridge.to_numpy(x) == value).all())


# -- user streams -----------------------------------------------------------------------------------------


def test_current_streams_are_restored() -> None:
    stream = side_stream()
    f = arraybridge.cupy(lambda x: x * x)
    x = late(3)
    assert is_all(f(x), 9)
    assert cupy.cuda.get_current_stream() == stream
    with cupy.cuda.Stream(non_blocking=True) as inner:
        f(x)
        assert cupy.cuda.get_current_stream() == inner


@of_each_framework
def test_input_is_complete_when_a_function_copies_it_to_the_host(name: str) -> None:
    require(name)
    seen: list[Any] = []
    fetch = arraybridge.framework(name).decorator(
        lambda x: seen.append(x.get() if name == "cupy" else x.cpu().numpy())
    )
    with own_stream(name):
        for value in range(1, 5):
            fetch(late_array_of(name, value))
            assert (seen[-1] == value).all()


def test_result_is_complete_when_the_caller_reads_it() -> None:
    f = arraybridge.cupy(lambda x: late(1) + x)
    stream = side_stream()
    for value in range(5):
        y = f(cupy.full(N, value, np.float32)) + 1
        assert (y.get(stream=stream) == value + 2).all()


@of_each_framework
def test_stream_waits_for_the_default_stream_by_handle(name: str) -> None:
    """Check the usual case: no stream was chosen, and the handle is 0."""
    require(name)
    queues = arraybridge.framework(name).streams
    x = late_array_of(name, 3)
    assert queues.handle(GPU) == 0
    with own_stream(name):
        queues.wait_for(GPU, 0)
        assert is_all(x, 3)


@needs_two_gpus
@of_each_framework
def test_handles_and_events_belong_to_the_given_gpu(name: str) -> None:
    require(name)
    queues = arraybridge.framework(name).streams
    other = Device("gpu", 1)
    with own_stream(name), arraybridge.framework(name).devices.select(other), own_stream(name, 1) as there:
        expected = there.ptr if name == "cupy" else there.cuda_stream
        x = late_array_of(name, 3, 1)
        with arraybridge.framework(name).devices.select(GPU):
            assert queues.handle(other) == expected != queues.handle(GPU)
            event = queues.record_event(other)
        assert event is not None
        with own_stream(name, 1):
            event.wait()
            assert is_all(x, 3)


@of_each_framework
def test_block_until_ready_holds_for_every_stream(name: str) -> None:
    require(name)
    with own_stream(name):
        x = late_array_of(name, 3)
        arraybridge.framework(name).interchange.block_until_ready(x)
        with own_stream(name):
            assert is_all(x, 3)


# -- user kernels, as docs/kernels.md shows them ---------------------------------------------------------


SCALE = r"""
extern "C" __global__ void scale(const float* x, float* out, float by, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i] * by;
}
"""


def tripled(x: Any) -> Any:
    """Triple an array with a raw kernel of CuPy."""
    out = cupy.empty_like(x)
    kernel = cupy.RawKernel(SCALE, "scale")
    kernel(((x.size + 127) // 128,), (128,), (x, out, np.float32(3), np.int32(x.size)))
    return out


def tripled_on_the_default_stream(x: Any) -> Any:
    """Launch as numba.cuda and PyCUDA do: on the legacy default stream, regardless of CuPy's current one."""
    with cupy.cuda.Stream.null:
        return tripled(x)


@pytest.mark.parametrize(
    ("kernel", "stream"), [(tripled, True), (tripled, False), (tripled_on_the_default_stream, False)]
)
def test_kernels_are_ordered_with_their_caller(kernel: Any, stream: bool) -> None:
    """Check an input that is not computed yet at launch, and a result that is read on the caller's stream."""
    triple = arraybridge.cupy(stream=stream)(kernel)
    caller = cupy.cuda.Stream.null if kernel is tripled_on_the_default_stream else side_stream()
    with caller:
        for _ in range(3):
            x = late(2)
            y = triple(x)
            x.fill(-1)  # after the kernel has read the input
            assert is_all(y + 1, 7)  # after the kernel has written the output
    host = np.arange(N, dtype=np.float32)
    result = arraybridge.cupy(gpu_id=0, output_type="input", stream=stream)(kernel)(host)
    np.testing.assert_array_equal(result, host * 3, strict=True)


# -- sources that are dropped early -----------------------------------------------------------------------


def cupy_on_the_other_gpu(x: Any) -> Any:
    """Convert while the other GPU is current: handle 0 means the default stream of the array's GPU."""
    with cupy.cuda.Device(1):
        return arraybridge.to_gpu(x, 1)


MOVES: dict[str, Any] = {
    "convert_memory": lambda x: arraybridge.convert_memory(x, "cupy", gpu_id=1),
    "decorator": arraybridge.cupy(gpu_id=1)(lambda x: x),
    "to_gpu": lambda x: arraybridge.to_gpu(x, 1),
    "default streams": cupy_on_the_other_gpu,
}


@needs_two_gpus
@pytest.mark.parametrize("how", MOVES)
def test_source_of_a_copy_between_gpus_is_read_before_reuse(how: str) -> None:
    if how != "default streams":
        side_stream()
        with cupy.cuda.Device(1):
            side_stream()
    for value in (3, 5):
        x = late(value)
        address = address_of(x)
        y = MOVES[how](x)
        del x
        gc.collect()
        assert overwrite(address), NOTHING_SHOWN
        cupy.cuda.get_current_stream().synchronize()
        assert arraybridge.device_of(y) == "gpu:1"
        assert is_all(y, value)


@of_each_framework
def test_memory_of_another_thread_is_read_before_reuse(name: str) -> None:
    require(name)
    arraybridge.free_memory(name)  # so that the next array reuses the memory freed last
    with own_stream(name) as made:
        x = late_array_of(name, 3)
        address = address_of(x)
    with own_stream(name) as reader:
        reader.wait_event(made.record() if name == "cupy" else made.record_event())
        y = arraybridge.framework(name).streams.take_over(x)
        assert address_of(y) == address, "the array must not be copied"
        z = copy_of(y)
        del x, y
    cupy.cuda.Stream.null.synchronize()  # no other reader on that device
    with made if name == "cupy" else require("torch").cuda.stream(made):
        again = overwrite(address, name)
        assert not (again and EMULATED in ("lazy", "guarded")), "memory was reused before it was read"
        made.synchronize()
    reader.synchronize()
    assert is_all(z, 3)


@pytest.mark.parametrize("shape", ["array", "list", "view"])
def test_result_is_read_before_its_stream_reuses_the_memory(shape: str) -> None:
    """Read the result on the default stream of another thread and drop it, while the first thread calls
    again.
    """

    @arraybridge.cupy
    def f(x: Any) -> Any:
        y = x + 0
        return {"array": y, "list": [y], "view": y[:]}[shape]

    def read(box: list[Any]) -> None:
        y = box.pop()
        sums.append(late(0) + (y[0] if shape == "list" else y))

    sums: list[Any] = []
    side_stream()
    for _ in range(3):
        box = [f(late(6))]
        cupy.cuda.get_current_stream().synchronize()
        reader = threading.Thread(target=read, args=(box,))
        reader.start()
        reader.join()
        for _ in range(3):
            f(cupy.full(N, -1, np.float32))
        cupy.cuda.get_current_stream().synchronize()
    cupy.cuda.Stream.null.synchronize()
    assert all(is_all(total, 6) for total in sums)


# -- memory that is exported to another framework -----------------------------------------------------------


@pytest.mark.parametrize("how", ["shared", "copied", "to the other GPU", "decorated"])
@pytest.mark.parametrize("target", ["cupy", "torch"])
def test_exported_memory_is_read_before_its_owner_reuses_it(target: str, how: str) -> None:
    """Use a separate stream per framework, drop the source immediately, and reuse its memory."""
    torch = require("torch")
    if how == "to the other GPU":
        require_two_gpus()
    owner = "torch" if target == "cupy" else "cupy"
    bring = {
        "shared": lambda x: arraybridge.convert_memory(x, target, copy=False),
        "copied": lambda x: arraybridge.convert_memory(x, target, copy=True),
        "to the other GPU": lambda x: arraybridge.convert_memory(x, target, gpu_id=1),
        "decorated": arraybridge.framework(target).decorator(copy_of),
    }[how]
    mine = side_stream()
    with own_stream("torch"):
        for value in (3, 5):
            x = late_array_of(owner, value)
            address = address_of(x)
            y = bring(x)
            z = copy_of(y)
            del x, y
            gc.collect()
            # If the conversion copies immediately, the copy may take the owner's memory.
            assert overwrite(address, owner) or how == "copied"
            # Read the owner's stream first: its new values must not arrive before the read.
            queues = [mine, torch.cuda.current_stream(0)]
            for queue in reversed(queues) if target == "cupy" else queues:
                queue.synchronize()
            assert is_all(z, value)


@needs_two_gpus
@pytest.mark.parametrize(
    ("source", "target"), [("cupy", "torch"), ("cupy", "jax"), ("torch", "cupy"), ("torch", "jax")]
)
def test_exports_from_a_gpu_that_is_not_current_are_ordered(source: str, target: str) -> None:
    """Check PyTorch and CuPy, whose own exports only handle the current device."""
    torch = require("torch")
    require(target)
    if target == "jax":
        needs_kernels_of("XLA")
    with cupy.cuda.Device(1), torch.cuda.device(1):
        side_stream()
        x = late_array_of(source, 3, 1)
    y = arraybridge.convert_memory(x, target, copy=False)
    assert arraybridge.device_of(y) == "gpu:1"
    assert (cupy.cuda.Device().id, torch.cuda.current_device()) == (0, 0)
    assert is_all(y, 3)


@pytest.mark.parametrize(
    ("source", "target"), [("jax", "cupy"), ("jax", "torch"), ("cupy", "jax"), ("torch", "jax")]
)
def test_jax_exports_and_imports_are_read_before_a_write(source: str, target: str) -> None:
    require(source)
    require(target)
    jax = require("jax")
    needs_kernels_of("XLA")
    gpu = jax.devices("gpu")[0]

    def make(name: str, value: float) -> Any:
        host = np.full(1 << 20, value, np.float32)
        if name == "jax":
            return jax.numpy.sin(jax.device_put(host, gpu)) * 0 + value
        return arraybridge.convert_memory(host, name, gpu_id=0) + 0

    for value in range(10):
        x = make(source, value)
        y = arraybridge.convert_memory(x, target, copy=False)
        for _ in range(20):
            z = y + 1
        del x, y
        again = [make(source, -1) for _ in range(4)]
        assert is_all(z, value + 1)
        assert len(again) == 4


class Foreign:
    """An array of an unknown library that exports through one of two protocols. CuPy allocates the memory.

    Attributes:
        read_only: Whether the memory must not be written to.
        stream: The stream of the library; None for CuPy's current stream.
    """

    read_only = False
    stream: Any = None

    def __init__(self, array: Any) -> None:
        self.array = array


class ForeignInterface(Foreign):
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        interface = dict(self.array.__cuda_array_interface__)
        own = self.stream or (cupy.cuda.get_current_stream() if cupy else None)
        stream = own.ptr if own else 0
        return {**interface, "data": (interface["data"][0], self.read_only), "stream": stream or 1}


class ForeignDlpack(Foreign):
    def __dlpack__(self, **options: Any) -> Any:
        with self.stream or nullcontext():
            exported = self.array.__dlpack__(**options)
        if self.read_only and "max_version" in options:
            set_read_only(exported)
        return exported

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.array.device.id  # CuPy's own method opens the current GPU


def set_read_only(capsule: Any) -> None:
    """Set the flag of a versioned capsule, which follows the version, the context and the deleter."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    flags = ctypes.c_uint64.from_address(pointer(capsule, b"dltensor_versioned") + 24)
    flags.value |= 1


class StreamlessInterchange(Interchange):
    dlpack_device = 2


class StreamlessFramework(arraybridge.Framework):
    """A framework without streams that others could wait for, such as JAX."""

    name = "lender"
    modules = ("tests",)
    interchange = component(StreamlessInterchange)

    def owns(self, x: Any) -> bool:
        return isinstance(x, ForeignDlpack)


@needs_two_gpus
@pytest.mark.parametrize("protocol", ["interface", "dlpack", "framework"])
@of_each_framework
def test_arrays_on_another_gpu_are_imported_in_order(name: str, protocol: str) -> None:
    """Check unknown libraries, and a framework without streams, while the first GPU is current."""
    require(name)
    second = Device("gpu", 1)
    with cupy.cuda.Device(1):
        made = cupy.cuda.Stream(non_blocking=True)
        with made:
            x = (ForeignInterface if protocol == "interface" else ForeignDlpack)(late(3))
        if protocol != "framework":
            x.stream = made
    source = StreamlessFramework() if protocol == "framework" else FOREIGN_HOST
    if protocol == "framework":  # it exports after its work is done
        made.synchronize()
    y = arraybridge.framework(name).interchange.import_from(x, source, second)
    with arraybridge.framework(name).devices.select(second):
        z = copy_of(y)
    assert (str(arraybridge.device_of(z)), is_all(z, 3)) == ("gpu:1", True)


@pytest.mark.parametrize("target", ["cupy", "torch"])
def test_exports_of_a_framework_without_streams_stay_alive_until_read(target: str) -> None:
    require(target)
    import_from = arraybridge.framework(target).interchange.import_from
    cupy.get_default_memory_pool().free_all_blocks()  # so that the next array reuses the memory freed last
    made = side_stream()
    x = late(3)
    address = address_of(x)
    with own_stream(target) as reader:
        made.use()
        exported = ForeignDlpack(x)
        if target == "cupy":
            reader.use()
            reader.wait_event(made.record())
        y = import_from(exported, StreamlessFramework(), GPU)
        z = copy_of(y)
        del x, exported, y
        gc.collect()
    made.use()
    assert not overwrite(address), "memory was reused before it was read"
    made.synchronize()
    reader.synchronize()
    assert is_all(z, 3)
    used = cupy.get_default_memory_pool().used_bytes()
    keep_alives.block_until_ready()
    gc.collect()
    assert cupy.get_default_memory_pool().used_bytes() == used - 4 * N, "memory is still allocated"


class Exporter(Streams):
    """The streams of a framework whose current stream may change after an export."""

    def __init__(self, stream: Any, *, refuses: bool = False) -> None:
        self.stream = stream
        self.refuses = refuses

    def handle(self, device: Device) -> int:
        return int(self.stream.ptr)

    def wait_for(self, device: Device, handle: int) -> None:
        if self.refuses:
            raise RuntimeError("invalid resource handle")
        event = cupy.cuda.Event(disable_timing=True)
        cupy.cuda.runtime.eventRecord(event.ptr, handle)
        self.stream.wait_event(event)


@pytest.mark.parametrize("case", ["same stream", "another stream", "no order"])
def test_exported_memory_is_read_before_its_exporter_reuses_it(case: str) -> None:
    """Check exporters in the stream of the export, in another one, and without any order."""
    cupy.get_default_memory_pool().free_all_blocks()
    made = side_stream()
    x = late(3)
    address = address_of(x)
    used = cupy.get_default_memory_pool().used_bytes()
    exporter = Exporter(made, refuses=case == "no order")
    with cupy.cuda.Stream(non_blocking=True) as reader:
        reader.wait_event(made.record())
        owner = keep_alives.keep_alive(x, exporter, arraybridge.framework("cupy").streams, GPU)
        z = x + 0
        if case == "another stream":
            exporter.stream = cupy.cuda.Stream(non_blocking=True)
        del x, owner
        gc.collect()
    if case == "same stream":
        assert cupy.get_default_memory_pool().used_bytes() == used, "the export was not released at once"
    with made:
        overwrite(address)
    made.synchronize()
    reader.synchronize()
    assert is_all(z, 3)


def test_a_per_thread_default_stream_is_waited_for() -> None:
    require("cupy")
    said = output_of(
        "import numpy as np, cupy, arraybridge as ab",
        "from tests.gpu.twin import TwinFramework, TwinArray",
        "own = TwinFramework(); ab.register(own); gpu = ab.Device('gpu', 0)",
        "stream = own.streams.of(gpu); buffer = TwinArray(cupy.empty(4096, np.float32), stream)",
        "def items():",
        "    for value in range(6): buffer.fill(value); stream.synchronize(); yield buffer",
        "results = list(ab.prefetch(items(), 'cupy', dtype='float64', depth=9))",
        "print([bool((ab.to_numpy(y) == i).all()) for i, y in enumerate(results)] == [True] * 6)",
        env={"CUPY_CUDA_PER_THREAD_DEFAULT_STREAM": "1"},
    )
    assert said == "True"


def test_a_stream_that_the_function_selects_is_waited_for() -> None:
    other = cupy.cuda.Stream(non_blocking=True)

    @arraybridge.cupy
    def f(x: Any) -> Any:
        mine = cupy.cuda.get_current_stream()
        other.use()
        other.wait_event(mine.record())
        return late(1) + x

    side_stream()
    assert is_all(f(late(2)), 3)


def test_memory_of_a_finished_pipeline_is_freed_after_the_read() -> None:
    (y,) = Pipeline(lambda x: x + 0).map([cupy.zeros(1 << 20)])
    z = y + 0  # still queued
    del y
    arraybridge.free_memory()
    assert cupy.get_default_memory_pool().total_bytes() <= z.nbytes


def test_results_of_threads_keep_their_strides() -> None:
    host = np.arange(12.0).reshape(3, 4)
    (y,) = Pipeline(lambda x: x.T).map([cupy.asarray(host)])
    assert y.get().tolist() == host.T.tolist()


@needs_two_gpus
def test_an_array_of_another_framework_moves_to_another_gpu_in_order() -> None:
    from tests.gpu.twin import TwinArray, TwinFramework

    with registry_kept():
        twin = TwinFramework()
        arraybridge.register(twin)
        with cupy.cuda.Device(1):
            stream = twin.streams.of(Device("gpu", 1))
            with stream:
                x = TwinArray(late(3), stream)
        y = arraybridge.convert_memory(x, "cupy", 0)
        assert (str(arraybridge.device_of(y)), is_all(y, 3)) == ("gpu:0", True)


@needs_two_gpus
def test_plain_functions_run_on_the_gpu_of_their_worker() -> None:
    (y,) = device_map(lambda n: cupy.zeros(n), [3], ["gpu:1"])
    assert str(arraybridge.device_of(y)) == "gpu:1"


def test_views_keep_exported_memory_alive() -> None:
    require("torch")
    side_stream()
    with own_stream("torch"):
        x = late(3)
        address = address_of(x)
        part = arraybridge.to_torch(x)[5:9]
        del x
        gc.collect()
        assert not overwrite(address), "memory was reused while a view was alive"
        assert part.cpu().tolist() == [3.0] * 4


@pytest.mark.parametrize("default", [False, True], ids=["own stream", "default stream"])
@pytest.mark.parametrize("read_only", [False, True], ids=["writable", "read-only"])
@pytest.mark.parametrize("protocol", ["interface", "dlpack"])
@of_each_framework
def test_arrays_of_unknown_libraries_enter_in_order(
    name: str, protocol: str, read_only: bool, default: bool
) -> None:
    """Check that read-only memory is copied, and that `explain` and the conversion agree."""
    require(name)
    made = cupy.cuda.Stream.null if default else cupy.cuda.Stream(non_blocking=True)
    with made:
        x = (ForeignInterface if protocol == "interface" else ForeignDlpack)(late(3))
    x.read_only = read_only
    x.stream = made
    with own_stream(name):
        route = arraybridge.explain(x, name, device="gpu:0")
        y = arraybridge.convert_memory(x, name, device="gpu:0")
        assert is_all(y, 3)
        shared = arraybridge.convert_memory(x, name, device="gpu:0", copy=False)
        assert arraybridge.explain(x, name, device="gpu:0", copy=True).code is Reason.COPY_REQUESTED
    assert (address_of(y) == address_of(x.array)) is not read_only
    assert address_of(shared) == address_of(x.array)
    expected = Reason.READ_ONLY if read_only else Reason.SHARED_DEVICE_MEMORY
    assert (route.code, route.shares_memory, route.copies) == (expected, not read_only, int(read_only))


# -- prefetch, device_map and Pipeline --------------------------------------------------------------------


@pytest.mark.parametrize("how", ["prefetch", "Pipeline"])
def test_arrays_stay_alive_until_a_thread_has_read_them(how: str) -> None:
    """Check a source that makes each item on a separate stream and reuses the memory immediately."""
    cupy.get_default_memory_pool().free_all_blocks()  # so that the next array reuses the memory freed last
    made = cupy.cuda.Stream(non_blocking=True)
    addresses: list[int] = []

    def items() -> Iterator[Any]:
        with made:
            x = late(3)
        cupy.cuda.get_current_stream().wait_event(made.record())
        addresses.append(address_of(x))
        yield x

    if how == "prefetch":
        (y,) = prefetch(items(), "cupy", 0, dtype="float64")
    else:
        (y,) = Pipeline(lambda x: x.astype("float64")).map(items())
    for thread in threading.enumerate():
        if thread.name.startswith("arraybridge-"):
            thread.join(600)
    gc.collect()
    with made:
        assert overwrite(addresses[0]), NOTHING_SHOWN
    made.synchronize()
    assert is_all(y, 3)


REFILLED: dict[str, tuple[str, dict[str, Any]]] = {
    "cast": ("cupy", {"gpu_id": 0, "dtype": "float64"}),
    "to the other GPU": ("cupy", {"gpu_id": 1}),
    "from torch": ("torch", {"gpu_id": 0, "copy": True}),
}


@needs_two_gpus
@pytest.mark.parametrize("how", REFILLED)
def test_prefetch_source_reuses_one_buffer(how: str) -> None:
    """Check that refilling a buffer waits until the previous item was copied, as documented."""
    name, options = REFILLED[how]
    require(name)

    def items() -> Iterator[Any]:
        with own_stream(name):
            buffer = arraybridge.framework(name).batching.empty((N,), "float32", GPU)
            for value in range(4):
                (buffer.fill_ if name == "torch" else buffer.fill)(float(value))
                yield buffer

    results = list(prefetch(items(), "cupy", depth=9, **options))
    assert [is_all(y, value) for value, y in enumerate(results)] == [True] * 4


@needs_two_gpus
@pytest.mark.parametrize("decorated", [True, False])
def test_device_map_on_two_gpus(decorated: bool) -> None:
    seen = set()

    def triple(x: Any) -> Any:
        seen.add(str(arraybridge.device_of(x)))
        return x * 3

    def items() -> Iterator[Any]:
        for i in range(24):
            yield late(i)  # no other reference is left
            overwrite(0)

    fn = arraybridge.cupy(triple) if decorated else triple
    side_stream()
    for i, y in enumerate(device_map(fn, items(), ["gpu:0", "gpu:1"], per_device=2)):
        assert is_all(y, 3 * i), i
    assert seen <= {"gpu:0", "gpu:1"}
    assert cupy.cuda.Device().id == 0


@needs_two_gpus
def test_pipeline_on_two_gpus() -> None:
    stages = [
        arraybridge.cupy(gpu_id=0)(lambda x: late(1, x.size).reshape(x.shape) + x),
        arraybridge.cupy(gpu_id=1)(lambda x: x * 2),
        arraybridge.cupy(gpu_id=0)(lambda x: late(3, x.size).reshape(x.shape) + x),
    ]
    x = np.arange(64 * 8, dtype=np.float32).reshape(64, 8)
    for _ in range(3):
        y = Pipeline(*stages, microbatches=16)(x)
        assert arraybridge.device_of(y) == "gpu:0"
        np.testing.assert_array_equal(arraybridge.to_numpy(y), (x + 1) * 2 + 3)


def test_pipeline_of_plain_functions_keeps_inputs_alive() -> None:
    """Check plain functions, which have no stream: the worker's stream is used, and their inputs stay
    alive.
    """

    def double(x: Any) -> Any:
        return (x + x).copy()

    def shift(x: Any) -> Any:
        return (late(1) + x).copy()

    side_stream()
    items = (late(i) for i in range(20))
    for i, y in enumerate(Pipeline(double, shift, double).map(items)):
        assert is_all(y, 2 * (2 * i + 1)), i
        overwrite(0)


def test_stage_stream_is_restored_after_a_user_stream() -> None:
    other = cupy.cuda.Stream(non_blocking=True)

    def stage(x: Any) -> Any:
        y = late(1) + x
        with other:
            cupy.cuda.get_current_stream()
        return y

    side_stream()
    for i, y in enumerate(Pipeline(stage).map(late(i) for i in range(4))):
        assert is_all(y, i + 1)
