"""Reasons are data: each has text and advice, and no decision depends on the text."""

from __future__ import annotations

import itertools
import pickle
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import CopyRequiredError, Framework, Route, convert_memory, explain, register, trace
from arraybridge.copy_advice import ADVICE, Copy, advice_for_copy
from arraybridge.reasons import DEPENDS_ON_LAYOUT, Cause, Reason, as_cause
from tests.helpers import registry_kept, require


def read_only() -> np.ndarray[Any, Any]:
    x = np.ones(4)
    x.flags.writeable = False
    return x


def read_only_file_map() -> np.ndarray[Any, Any]:
    with tempfile.TemporaryFile() as file:
        file.write(bytes(64))
        file.flush()
        return np.memmap(file, "float32", "r")


def misaligned_in_file() -> np.ndarray[Any, Any]:
    header = b'{"a": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}}'.ljust(64)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        path.write_bytes((64).to_bytes(8, "little") + header + bytes(64))
        return arraybridge.load_safetensors(path)["a"]


def aligned() -> np.ndarray[Any, Any]:
    x: Any = arraybridge.aligned((4, 4), "float32")
    x[...] = 1
    return x


def misread_bools() -> np.ndarray[Any, Any]:
    x: Any = arraybridge.aligned(4, "uint8")
    x[...] = 7
    return x


def conjugated() -> Any:
    return require("torch").ones(3, dtype=require("torch").complex64).conj()


def on_two_devices(replicated: bool) -> Any:
    jax = require("jax")
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:2]), ("rows",))
    spec = jax.sharding.PartitionSpec() if replicated else jax.sharding.PartitionSpec("rows")
    return jax.device_put(np.ones((4, 3), np.float32), jax.sharding.NamedSharding(mesh, spec))


def float8() -> Any:
    return np.ones(4).astype(require("ml_dtypes").float8_e4m3fn)


class Scan:
    """An object that carries an array."""


class Scans(arraybridge.Carrier):
    def carries(self, x: Any) -> bool:
        return isinstance(x, Scan)

    def array(self, x: Any) -> Any:
        return np.ones(3), "the scanner keeps it elsewhere"


Make = Callable[[], Any]
#: Array, target, options → code, and a part of the advice.
CASES: list[tuple[Make, str, dict[str, Any], Reason, str]] = [
    (lambda: np.ones(3), "numpy", {}, Reason.SAME_OBJECT, ""),
    (aligned, "torch", {}, Reason.SHARED_HOST_MEMORY, ""),
    (aligned, "torch", {"copy": True}, Reason.COPY_REQUESTED, "omit copy=True"),
    (aligned, "numpy", {"copy": True}, Reason.COPY_REQUESTED, "omit copy=True"),
    (aligned, "torch", {"dtype": "float64"}, Reason.CAST_REQUESTED, "create the array in that dtype"),
    (aligned, "numpy", {"dtype": "float64"}, Reason.CAST_REQUESTED, "create the array in that dtype"),
    (
        lambda: aligned()[:, 1:],
        "tensorflow",
        {},
        Reason.NOT_C_CONTIGUOUS,
        "in memory from aligned(shape, dtype)",
    ),
    (lambda: aligned()[:, 1:], "jax", {}, Reason.NOT_COMPACT, "skips elements"),
    (
        lambda: aligned()[::-1],
        "torch",
        {},
        Reason.NEGATIVE_STRIDES,
        "make it C-contiguous where it is created",
    ),
    (
        lambda: np.zeros(4, [("a", "i1"), ("b", "f4")])["b"],
        "torch",
        {},
        Reason.STRIDE_MULTIPLES,
        "skips elements",
    ),
    (lambda: np.ones(80, np.uint8)[1:65], "jax", {}, Reason.MISALIGNED, "then arraybridge.to_jax(x)"),
    (misaligned_in_file, "jax", {}, Reason.MISALIGNED_IN_FILE, "load_safetensors(path)"),
    (
        lambda: np.zeros(17, np.uint8)[1:].view("complex128"),
        "torch",
        {},
        Reason.MISALIGNED_ELEMENTS,
        "then arraybridge.to_torch(x)",
    ),
    (lambda: np.ones(4, ">f8"), "torch", {}, Reason.BYTE_ORDER, "the native byte order"),
    (lambda: misread_bools().view(bool), "jax", {}, Reason.BOOL_BYTES, "x.view(np.uint8) != 0"),
    (read_only, "torch", {}, Reason.READ_ONLY, "to_torch(x, copy=False) shares it"),
    (read_only_file_map, "torch", {}, Reason.READ_ONLY_FILE_MAP, 'np.load(path, mmap_mode="c")'),
    (lambda: require("jax").numpy.float32(2), "torch", {}, Reason.CACHED_SCALAR, "pass a number"),
    (lambda: on_two_devices(True), "torch", {}, Reason.REPLICATED, "gather it"),
    (lambda: on_two_devices(False), "torch", {}, Reason.SEVERAL_SHARDS, "gather it"),
    (conjugated, "numpy", {}, Reason.LAZY_VALUES, "x.resolve_conj()"),
    (float8, "tensorflow", {}, Reason.FLOAT8, "use bfloat16"),
    (lambda: np.float32(1), "torch", {}, Reason.NUMPY_SCALAR, ""),
    (Scan, "torch", {}, Reason.OTHER, ""),
]
ENDS = (("numpy", "torch", "gpu:0"), ("numpy", "jax", "cpu"), ("jax", "torch", "cpu"))
SHARING = (Reason.SAME_OBJECT, Reason.SHARED_HOST_MEMORY)
#: Reasons without advice.
WITHOUT_ADVICE = frozenset(
    (
        # Nothing is copied.
        Reason.SAME_OBJECT,
        Reason.SHARED_HOST_MEMORY,
        Reason.SHARED_DEVICE_MEMORY,
        Reason.SHARED_MEMORY,
        Reason.REPLICA_ON_DEVICE,
        # The program requested a copy into its own array.
        Reason.INTO_OUTPUT,
        # The carrier does not expose memory that could be shared.
        Reason.FILE,
        Reason.SEPARATE_COLUMNS,
        Reason.MASKED_STORAGE,
        Reason.CHUNKED_STORAGE,
        Reason.PACKED_BITS,
        Reason.CARRIER_COPIES,
        Reason.LIBRARY_COPIES,
        Reason.NEW_MEMORY,
        Reason.NUMPY_SCALAR,
        # The program requested another distribution over devices.
        Reason.RESHARDED,
        # The conversion raises an error, which contains the advice.
        Reason.UNREADABLE_DEVICE,
        Reason.REQUIRES_GRAD,
        Reason.OTHER_SOURCE,
        Reason.NO_DEVICE,
        # The frameworks store sparse arrays differently, or the array has unused entries.
        Reason.SEPARATE_COORDINATES,
        Reason.SPARE_ENTRIES,
        # The reason comes from a plug-in.
        Reason.OTHER,
    )
)


@pytest.fixture(autouse=True)
def _scans() -> Iterator[None]:
    with registry_kept():
        arraybridge.register_carrier(Scans())
        yield


def needed(target: str) -> None:
    if target != "numpy":
        require(target)


def test_each_reason_has_a_text_and_advice_or_needs_none() -> None:
    details = {"framework": "torch", "source": "jax", "device": "gpu:0", "dtype": "float32", "words": "so"}
    for code in Reason:
        assert Cause(code, **details).text, code  # type: ignore[arg-type]
        assert (code in ADVICE) != (code in WITHOUT_ADVICE), code
    for code, layout, call in itertools.product(ADVICE, ("", "transposed"), ("", "jnp.asarray")):
        for source, target, device in ENDS:
            needed(target)
            advice = advice_for_copy(Copy(code, source, target, device, layout, call))
            moves = code in (Reason.NO_SHARED_MEMORY, Reason.OTHER_DEVICE, Reason.SEPARATE_MEMORY)
            assert advice or (moves and call and device == "cpu"), (code, layout, call, device)
    for code in WITHOUT_ADVICE:
        assert advice_for_copy(Copy(code, "numpy", "jax", "cpu")) == ""
    for code in ADVICE:
        by_layout = [
            advice_for_copy(Copy(code, "numpy", "jax", "cpu", layout)) for layout in ("", "transposed")
        ]
        assert (by_layout[0] != by_layout[1]) == (code in DEPENDS_ON_LAYOUT), code


@pytest.mark.parametrize(("make", "target", "options", "code", "advice"), CASES)
def test_explain_and_trace_agree_on_code_and_advice(
    make: Make, target: str, options: dict[str, Any], code: Reason, advice: str
) -> None:
    needed(target)
    x = make()
    route = explain(x, target, **options)
    assert (route.code, route.copies == 0) == (code, code in SHARING)
    assert advice in route.advice
    assert bool(advice) == bool(route.advice)
    with trace() as log:
        convert_memory(x, target, **options)
    (record,), (event,) = log.records, log.events
    assert record == route
    assert (record.code, record.advice, record.reason) == (route.code, route.advice, route.reason)
    assert (event.code, event.reason) == (route.code, route.reason)
    assert [spot.advice for spot in log.hotspots()] == ([route.advice] if route.copies else [])
    assert pickle.loads(pickle.dumps(route)) == route
    shared_on_request = (Reason.READ_ONLY, Reason.READ_ONLY_FILE_MAP, Reason.CACHED_SCALAR)
    if route.copies and not options and code not in shared_on_request:
        with pytest.raises(CopyRequiredError) as caught:
            convert_memory(x, target, copy=False)
        assert (caught.value.code, caught.value.reason) == (route.code, route.reason)


def test_a_replica_is_shared_after_it_was_gathered() -> None:
    require("torch")
    jax = require("jax")
    for replicated in (True, False):
        x = on_two_devices(replicated)
        assert (
            explain(x, "torch").advice
            == "gather it where it is created (jax.device_put(x, jax.devices()[0]))"
        )
        assert explain(jax.device_put(x, jax.devices("cpu")[0]), "torch").copies == 0


def all_advice() -> list[str]:
    found = []
    for make, target, options, *_ in CASES:
        x = make()
        route = explain(x, target, **options)
        with trace() as log:
            convert_memory(x, target, **options)
        found += [route.advice, *(spot.advice for spot in log.hotspots())]
    torch = require("torch")
    jnp = require("jax").numpy
    with trace(foreign=True) as log:
        for x in (aligned(), aligned()[::-1], read_only(), np.ones(80, np.uint8)[1:65], np.ones(4)):
            torch.tensor(x.copy() if x.strides[0] < 0 else x)
            jnp.array(x)
    assert len(log.events) == 10
    found += [spot.advice for spot in log.hotspots()]
    return found


def test_no_advice_depends_on_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "jax", "tensorflow"):
        require(name)
    before = all_advice()
    assert len(set(before)) > 15
    for number, code in enumerate(Reason):
        monkeypatch.setattr(code, "template", f"reason {number}")
    assert explain(aligned(), "torch").reason.startswith("reason ")
    assert all_advice() == before


def test_a_plug_in_may_give_its_own_text() -> None:
    require("torch")

    class Plugin(Framework):
        name = "plugin"
        modules = ("plugin",)

        def owns(self, x: Any) -> bool:
            return False

        def cannot_view(self, view: np.ndarray[Any, Any]) -> str:
            return "its memory is on the moon" if view.size else ""

        def from_host(self, view: np.ndarray[Any, Any], device: Any) -> Any:
            return view

        def to_host(self, x: Any) -> np.ndarray[Any, Any]:
            return np.asarray(x)

    register(Plugin())
    assert explain(np.ones(0), "plugin").code == Reason.SHARED_HOST_MEMORY
    route = explain(np.ones(2), "plugin")
    assert (route.code, route.reason, route.copies) == (Reason.OTHER, "its memory is on the moon", 1)
    assert explain(Scan(), "torch").reason == "the scanner keeps it elsewhere"
    assert as_cause("") is as_cause(None) is None


def test_a_route_prints_as_before() -> None:
    require("torch")
    route: Route = explain(np.ones((2, 2))[::-1], "torch")
    assert str(route) == (
        "numpy → torch on cpu: copied through host memory (32 B),"
        " because torch does not support negative strides."
    )
    assert "advice" not in repr(route)
    assert "code" not in repr(route)
