"""Conversions by the frameworks' own functions: each one is traced with its line, and behaves as before."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import itertools
import pickle
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import trace
from arraybridge.tracing import events, interception
from arraybridge.tracing.events import Event
from arraybridge.tracing.trace_log import everywhere as trace_everywhere
from tests.helpers import output_of, require, run_python

torch = require("torch")
jax = require("jax")
tf = require("tensorflow")
jnp = jax.numpy

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide compilers that another test may have loaded."""
    monkeypatch.setattr(interception, "_COMPILER", "never loaded")


def aligned(dtype: str = "float32") -> np.ndarray[Any, Any]:
    x = arraybridge.aligned((512, 512), dtype)
    x[...] = 1
    return x


def unaligned() -> np.ndarray[Any, Any]:
    return arraybridge.aligned((512 * 512 + 1,), "float32")[1:]


def read_only() -> np.ndarray[Any, Any]:
    x = aligned()
    x.flags.writeable = False
    return x


def foreign_events(call: Callable[[], Any]) -> list[Event]:
    """Return the events of third-party conversions that a call records."""
    with trace(foreign=True) as log:
        call()
    return [event for event in log.events if event.kind == "foreign"]


doubles = partial(aligned, "float64")
of_torch = partial(torch.ones, 512, 512)
of_jax = partial(jnp.ones, (512, 512))
of_tensorflow = partial(tf.ones, (512, 512))


def of_variable() -> Any:
    return tf.Variable(of_tensorflow())


SAME, COPY = ("same memory", ""), "could be shared"
READ_ONLY = ("it is read-only", "arraybridge.to_torch(x, copy=False) shares it")
OF_NUMPY, OF_TENSORFLOW = (COPY, "arraybridge.to_tensorflow(x)"), (COPY, "arraybridge.to_numpy(x) shares it")
tf_dlpack, torch_dlpack = tf.experimental.dlpack, torch.utils.dlpack
# The name of the function, the frameworks, its argument, the call, and parts of the reason and of the
# advice. A DLPack capsule does not state whose memory it exports. fmt: off
ROWS: list[tuple[str, str, Callable[[], Any], Callable[[Any], Any], tuple[str, str]]] = [
    ("torch.from_numpy", "numpy-torch", aligned, lambda x: torch.from_numpy(x), SAME),
    ("torch.as_tensor", "numpy-torch", aligned, lambda x: torch.as_tensor(x), SAME),
    ("torch.asarray", "numpy-torch", aligned, lambda x: torch.asarray(x), SAME),
    ("torch.from_dlpack", "numpy-torch", aligned, lambda x: torch.from_dlpack(x), SAME),
    (
        "torch.from_dlpack",
        "capsule-torch",
        of_tensorflow,
        lambda x: torch.from_dlpack(tf_dlpack.to_dlpack(x)),
        SAME,
    ),
    ("torch.utils.dlpack.from_dlpack", "jax-torch", of_jax, lambda x: torch_dlpack.from_dlpack(x), SAME),
    ("Tensor.numpy", "torch-numpy", of_torch, lambda x: x.numpy(), SAME),
    ("np.asarray", "torch-numpy", of_torch, lambda x: np.asarray(x), SAME),
    ("np.asarray", "jax-numpy", of_jax, lambda x: np.asarray(x), SAME),
    ("np.asarray", "tensorflow-numpy", of_tensorflow, lambda x: np.asarray(x), SAME),
    ("np.from_dlpack", "torch-numpy", of_torch, lambda x: np.from_dlpack(x), SAME),
    ("jnp.from_dlpack", "torch-jax", of_torch, lambda x: jnp.from_dlpack(x), SAME),
    ("jax.dlpack.from_dlpack", "torch-jax", of_torch, lambda x: jax.dlpack.from_dlpack(x), SAME),
    (
        "tf.experimental.dlpack.from_dlpack",
        "capsule-tensorflow",
        of_jax,
        lambda x: tf_dlpack.from_dlpack(dlcapsule=x.__dlpack__()),
        SAME,
    ),
    ("torch.tensor", "numpy-torch", aligned, lambda x: torch.tensor(x), (COPY, "torch.from_numpy(x)")),
    ("torch.tensor", "numpy-torch", lambda: aligned().T, lambda x: torch.tensor(x), (COPY, "from_numpy(x)")),
    ("torch.tensor", "numpy-torch", read_only, lambda x: torch.tensor(x), READ_ONLY),
    ("Tensor.to", "torch-torch", of_torch, lambda x: x.to(torch.int32), ("a cast to int32", "in that dtype")),
    ("np.array", "jax-numpy", of_jax, lambda x: np.array(x), (COPY, "np.asarray(x)")),
    ("jnp.asarray", "numpy-jax", aligned, lambda x: jnp.asarray(x), (COPY, "to_jax(x) shares it")),
    ("jnp.asarray", "numpy-jax", unaligned, lambda x: jnp.asarray(x), ("not aligned to 64", "aligned(shape")),
    ("jnp.array", "numpy-jax", doubles, lambda x: jnp.array(x), ("narrowed from float64", "keeps all bits")),
    ("jax.device_put", "numpy-jax", unaligned, lambda x: jax.device_put(x), ("not aligned", "aligned(shape")),
    ("tf.constant", "numpy-tensorflow", aligned, lambda x: tf.constant(x), OF_NUMPY),
    ("tf.convert_to_tensor", "numpy-tensorflow", aligned, lambda x: tf.convert_to_tensor(x), OF_NUMPY),
    ("tf.Tensor.numpy", "tensorflow-numpy", of_tensorflow, lambda x: x.numpy(), OF_TENSORFLOW),
    ("np.asarray", "tensorflow-numpy", of_variable, lambda x: np.asarray(x), OF_TENSORFLOW),
    ("tf.Variable.numpy", "tensorflow-numpy", of_variable, lambda x: x.numpy(), OF_TENSORFLOW),
]
# fmt: on


@pytest.mark.parametrize(
    ("name", "pair", "make", "call", "words"), ROWS, ids=[f"{row[0]}-{row[1]}" for row in ROWS]
)
def test_each_call_is_recorded(name: str, pair: str, make: Any, call: Any, words: tuple[str, str]) -> None:
    x, (reason, advice) = make(), words
    nbytes = 0 if words == SAME else MIB
    with trace(foreign=True) as log:
        call(x)
    (event,) = log.events
    assert (event.kind, event.name, event.nbytes) == ("foreign", name, nbytes)
    assert f"{event.source}-{event.target}" == pair
    assert reason in event.reason
    assert event.file == __file__
    assert event.line in {line for _, _, line in call.__code__.co_lines()}
    assert event.seconds > 0
    if words == SAME:
        assert list(log.hotspots()) == []
        return
    (spot,) = log.hotspots()
    assert spot.nbytes == nbytes
    assert advice in spot.advice
    assert bool(advice) == bool(spot.advice)
    assert log.records == [], "log.records must contain only conversions by arraybridge"


@pytest.mark.parametrize(
    ("dtype", "reason"),
    [
        (np.float32, "it is a cast to float32"),
        ("int32", "it is a cast to int32"),
        (np.float64, "it is narrowed from float64 to float32, since JAX's x64 is off"),
        (None, "it is narrowed from float64 to float32, since JAX's x64 is off"),
    ],
)
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")
def test_requested_dtype_is_not_reported_as_narrowing(dtype: Any, reason: str) -> None:
    x = doubles()
    assert [e.reason for e in foreign_events(lambda: jnp.asarray(x, dtype=dtype))] == [reason]
    assert [e.reason for e in foreign_events(lambda: jnp.array(x, dtype))] == [reason]


def test_calls_with_an_argument_after_the_dtype_are_recorded() -> None:
    x = aligned()
    (event,) = foreign_events(lambda: jnp.asarray(x, "float32", "K"))
    assert (event.source, event.target) == ("numpy", "jax")


def test_repeated_conversions_of_one_array_get_their_own_advice() -> None:
    x, others = aligned(), [aligned() for _ in range(3)]
    with trace(foreign=True) as log:
        for _ in range(3):
            jnp.asarray(x)
        for other in others:
            jnp.asarray(other)
    (first, second) = (spot.advice for spot in sorted(log.hotspots(), key=lambda spot: spot.line))
    assert "these 3 conversions convert the same array: convert it once, before the loop" in first
    assert "before the loop" not in second


def test_moves_between_jax_devices_are_recorded() -> None:
    x = jnp.ones((512, 512))
    (event,) = foreign_events(lambda: jax.device_put(x, jax.devices("cpu")[1]))
    assert (event.nbytes, event.device, event.reason) == (
        MIB,
        "cpu:1",
        "cpu:1 is a different device from cpu",
    )
    host = aligned()
    (event,) = foreign_events(lambda: jax.device_put(host, jax.devices("cpu")[1]))
    assert (event.nbytes, event.device, event.reason) == (0, "cpu:1", "both use the same memory")


def test_arrays_on_several_devices_are_recorded() -> None:
    x = jnp.ones((512, 512))
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:2]), ("rows",))
    by_rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    y = jax.device_put(x, by_rows)
    (event,) = foreign_events(lambda: jax.device_put(x, by_rows))
    assert (event.nbytes, event.reason) == (MIB, "it is redistributed over devices")
    assert foreign_events(lambda: jax.device_put(y, by_rows)) == [], "no conversion: same sharding"
    with trace(foreign=True) as log:
        np.asarray(y)
    ((event,), (spot,)) = log.events, log.hotspots()
    assert (event.nbytes, event.reason) == (MIB, "it is sharded over several devices")
    assert "gather it where it is created" in spot.advice


def test_pyclesperanto() -> None:
    cle = require("pyclesperanto")
    push, pull = cle.push, cle.pull
    with trace(foreign=True) as log:
        image = cle.push(np.ones((4, 4), np.float32))
        cle.pull(image)
    assert [(e.name, e.nbytes) for e in log.events] == [("cle.push", 64), ("cle.pull", 64)]
    assert cle.push is push
    assert cle.pull is pull


# ---- calls that are not recorded ---------------------------------------------------------------------


def test_calls_that_are_not_recorded() -> None:
    x, t = aligned(), torch.ones(4)
    assert foreign_events(lambda: np.asarray(x)) == [], "no conversion"
    assert foreign_events(lambda: np.asarray([1, 2])) == [], "lists"
    assert foreign_events(lambda: torch.tensor(3.0)) == [], "numbers"
    assert foreign_events(lambda: t.cpu()) == [], "no conversion: same device"
    assert foreign_events(lambda: repr(t.double())) == [], "casts for printing"
    assert foreign_events(lambda: jax.jit(lambda y: jnp.asarray(y) + 1)(x)) == [], "traced values"
    assert foreign_events(lambda: arraybridge.to_torch(aligned())) == [], "steps of arraybridge"
    assert foreign_events(lambda: tf.constant(["a"]).numpy()) == [], "strings"
    assert foreign_events(lambda: t.to("meta", torch.int32)) == [], "meta tensors"
    with trace() as log:
        torch.from_numpy(x)
    assert not log.events, "a trace without foreign=True"


# ---- unchanged behavior ------------------------------------------------------------------------------


#: Module → the names of its intercepted functions.
FUNCTIONS: dict[Any, str] = {
    torch: "from_numpy tensor as_tensor asarray from_dlpack", tf: "constant convert_to_tensor",
    jnp: "asarray array from_dlpack", jax: "device_put", np: "asarray array asanyarray ascontiguousarray",
}  # fmt: skip


def every_call() -> dict[str, Any]:
    """Return the functions and some methods in their current state."""
    holders = {**FUNCTIONS, torch.Tensor: "numpy to cpu"}
    return {
        f"{holder.__name__}.{n}": getattr(holder, n) for holder in holders for n in holders[holder].split()
    }


def test_original_functions_are_restored_on_every_exit() -> None:
    before = every_call()
    inherited = "numpy" in vars(torch.Tensor)
    with contextlib.suppress(KeyError), trace(foreign=True), trace(foreign=True):
        assert all(every_call()[name] is not call for name, call in before.items())
        raise KeyError
    assert all(every_call()[name] is call for name, call in before.items())
    assert ("numpy" in vars(torch.Tensor)) == inherited
    assert interception._later not in sys.meta_path
    with trace():
        assert torch.from_numpy is before["torch.from_numpy"]


def test_traces_may_end_in_any_order() -> None:
    first, second = trace(foreign=True), trace(foreign=True)
    log_1, log_2 = first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    torch.tensor(aligned())
    second.__exit__(None, None, None)
    assert len(log_2.events) == 1
    assert not log_1.events
    assert every_call()["numpy.asarray"] is np.asarray


def test_wrapped_functions_behave_like_the_originals() -> None:
    class Marked(torch.Tensor):  # type: ignore[misc]
        pass

    originals = every_call()
    with trace(foreign=True):
        for name, call in every_call().items():
            assert call == originals[name], name
            assert hash(call) == hash(originals[name]), name
            assert (call.__name__, call.__doc__) == (originals[name].__name__, originals[name].__doc__), name
        assert pickle.loads(pickle.dumps(np.asarray)) == originals["numpy.asarray"]
        assert inspect.signature(jnp.asarray) == inspect.signature(originals["jax.numpy.asarray"])
        x, kept = torch.ones(3, requires_grad=True), np.asarray
        (x.to(torch.float64) * 2).sum().backward()
        assert type(torch.ones(2).as_subclass(Marked).to(torch.float64)) is Marked
    assert x.grad.tolist() == [2, 2, 2]  # type: ignore[union-attr]
    assert kept([1, 2]).tolist() == [1, 2], "a stored function must still work after the trace"


# fmt: off
ARGUMENTS: list[Any] = [
    np.arange(6.0).reshape(2, 3), np.arange(6)[::-1], np.array(2.5), np.zeros((0, 3)), np.ones(3, ">f4"),
    np.ma.masked_array([1.0, 2.0], [True, False]), np.array(["a"]), np.array([None]), np.float32(3),
    [1, 2], (1.5,), 3, True, None, "word", b"bytes", {"a": 1}, range(3), object(), slice(2),
]
# fmt: on


def outcome(holder: Any, name: str, x: Any, options: dict[str, Any]) -> tuple[Any, ...]:
    """Return type, dtype, shape, values and sharing of a result, or the exception."""
    try:
        y = getattr(holder, name)(x, **options)
    except Exception as error:  # noqa: BLE001  # any exception has to be the same
        return type(error), str(error)
    if isinstance(y, dict):
        return type(y), str(y)
    host = np.array(y.detach() if isinstance(y, torch.Tensor) else y)
    shares = isinstance(x, np.ndarray) and isinstance(y, np.ndarray) and np.shares_memory(x, y)
    flags = (y.flags.writeable, y.flags.c_contiguous) if isinstance(y, np.ndarray) else ()
    return type(y), y is x, str(getattr(y, "dtype", "")), host.shape, str(host), shares, flags


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("holder", FUNCTIONS, ids=lambda holder: holder.__name__)
def test_results_and_errors_are_the_same(holder: Any) -> None:
    tensors = [torch.arange(4.0), torch.ones(2, requires_grad=True), jnp.arange(4), tf.ones((2, 2))]
    options: list[dict[str, Any]] = [{}, {"dtype": None}, {"dtype": "float32"}, {"copy": True}]
    cases = []
    for name, x, option in itertools.product(FUNCTIONS[holder].split(), [*ARGUMENTS, *tensors], options):
        if getattr(holder, name) is torch.asarray and isinstance(x, (tf.Tensor, jax.Array)):
            continue  # the function reads a JAX array as flat float32
        if (
            getattr(holder, name) is torch.from_dlpack
            and isinstance(x, np.ndarray)
            and min((0, *x.strides)) < 0
        ):
            continue  # the call crashes the process (pytorch #188023)
        cases.append((outcome(holder, name, x, option), name, x, option))
    with trace(foreign=True):
        for expected, name, x, option in cases:
            assert outcome(holder, name, x, option) == expected, (name, x, option)


def test_methods_and_keywords() -> None:
    t = torch.arange(4.0)
    with trace(foreign=True) as log:
        assert t.numpy(force=True).tolist() == [0, 1, 2, 3]
        assert torch.Tensor.numpy(t).base is not None
        assert np.asarray(a=t, dtype=np.float64).dtype == np.float64
        assert next(map(torch.Tensor.cpu, [t])) is t
        assert t.to(dtype=torch.int64).tolist() == [0, 1, 2, 3]
    assert [e.name for e in log.events] == ["Tensor.numpy", "Tensor.numpy", "np.asarray", "Tensor.to"]


class UnhashableMeta(type):  # noqa: PLW1641  # on purpose
    """The metaclass of a class that cannot be a key of a dict."""

    def __eq__(cls, other: object) -> bool:
        return cls is other


class Unhashable(metaclass=UnhashableMeta):  # on purpose
    """An object with values, of an unhashable class."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.ones(3, dtype)


def test_objects_of_unhashable_classes_are_passed_on() -> None:
    def read() -> Any:
        try:
            return np.asarray(Unhashable()).tolist()
        except TypeError as error:  # NumPy >= 2.5 rejects unhashable classes itself
            return str(error)

    expected = read()
    with trace(foreign=True) as log:
        assert read() == expected
    assert not log.events


def test_each_package_of_wrapped_functions_belongs_to_a_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package pyclesperanto_prototype has another name than its framework."""
    package: Any = ModuleType("pyclesperanto_prototype")
    package.__spec__ = ModuleSpec(package.__name__, None)
    for name in ("push", "pull", "asarray"):
        setattr(package, name, lambda x: [*x])
    monkeypatch.setitem(sys.modules, package.__name__, package)
    with trace(foreign=True) as log:
        assert package.push(np.arange(2)) == [0, 1]
    assert not log.events


COMPILED = """
import numpy as np
from arraybridge.tracing.trace_log import everywhere
def f(x):
    return torch.tensor([1.0, 2.0]) + torch.as_tensor(x) * 2
def g(x):
    return torch.from_numpy(np.asarray([1.0, 2.0])) + x
with everywhere(foreign=True) as log:
    import torch
    w = torch.ones(2, requires_grad=True)
    torch.optim.SGD([w]).zero_grad()  # loads the compiler
    np.asarray(torch.ones(2))
    assert torch.compile(f, backend="eager", fullgraph=True)(torch.ones(2)).tolist() == [3, 4]
    assert torch.compile(g, backend="eager", fullgraph=True)(torch.ones(2)).tolist() == [2, 3]
    assert torch.jit.script(torch.nn.Linear(2, 2))(torch.ones(1, 2)).shape == (1, 2)
    torch.from_numpy(np.ones(2))
assert "_Call" not in type(torch.from_numpy).__name__
print([event.name for event in log.events])
"""


def test_frameworks_imported_during_a_trace_are_recorded() -> None:
    done = run_python("-W", "ignore", "-c", COMPILED, env={"PYTHONWARNINGS": "ignore"})
    assert done.stdout.strip() == "['np.asarray', 'torch.from_numpy']", done.stderr


# -- threads of libraries -------------------------------------------------------------------------------

# A library whose own thread converts arrays from a queue; its helper is another library.
FEEDER = """
import queue, threading
import {helper}

class Feeder:
    def __init__(self):
        self.jobs, self.results = queue.Queue(), queue.Queue()
        threading.Thread(target=self._loop, daemon=True).start()

    def _loop(self):
        while True:
            job = self.jobs.get()
            if job is None:
                return
            self.results.put({helper}.convert(job))

    def __call__(self, x):
        self.jobs.put(x)
        return self.results.get()
"""
HELPER = """
import numpy as np
import torch
import arraybridge

def convert(x):
    torch.tensor(x)
    return arraybridge.convert_memory(x[::-1], "torch")
"""


@pytest.fixture
def feeder(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import ``feeder_lib``, and return it with the folder that contains it and ``helper_lib``."""
    site = tmp_path / "site-packages"
    site.mkdir()
    (site / "feeder_lib.py").write_text(FEEDER.format(helper="helper_lib"), encoding="utf-8")
    (site / "helper_lib.py").write_text(HELPER, encoding="utf-8")
    monkeypatch.syspath_prepend(str(site))
    yield importlib.import_module("feeder_lib"), site
    for name in ("feeder_lib", "helper_lib"):
        sys.modules.pop(name, None)


def test_threads_of_libraries_show_their_innermost_line(feeder: Any) -> None:
    module, site = feeder
    source = unaligned()
    with trace_everywhere(foreign=True) as log:
        feed = module.Feeder()
        feed(source)
        feed.jobs.put(None)
        torch.tensor(source)
    theirs = [event for event in log.events if event.in_library]
    helper = str(site / "helper_lib.py")
    assert [(event.file, event.line, event.library) for event in theirs] == [
        (helper, 7, "helper_lib"),
        (helper, 8, "helper_lib"),
    ]
    spots = log.hotspots()
    assert [(spot.file, spot.in_library) for spot in spots] == [
        (__file__, False),
        (helper, True),
        (helper, True),
    ]
    assert spots[0].advice
    assert spots[1].source == "torch.tensor(x)" or spots[2].source == "torch.tensor(x)"
    lines = repr(spots).splitlines()
    heading = lines.index(next(line for line in lines if line.startswith("in threads of libraries")))
    assert all("helper_lib.py" not in line for line in lines[:heading])
    assert [spot.file for spot in log.hotspots(libraries=False)] == [__file__]


def test_threads_of_the_standard_library_show_their_innermost_line() -> None:
    with trace_everywhere(foreign=True) as log, ThreadPoolExecutor(1) as pool:
        pool.submit(torch.tensor, unaligned()).result()
    (event,) = log.events
    assert event.file.endswith("thread.py")
    assert "threading.py" not in event.file
    assert event.in_library
    (spot,) = log.hotspots()
    assert spot.libraries == ("Python",)


# -- pending computation --------------------------------------------------------------------------------


class Pending:
    """A clock that advances only while a computation is pending."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: str) -> None:
        self.now = 0.0
        wait = events.wait_for

        def waiting(source: Any, x: Any) -> None:
            wait(source, x)
            if source.name == owner:
                self.now += 100.0

        monkeypatch.setattr(events, "wait_for", waiting)
        monkeypatch.setattr("time.perf_counter", lambda: self.now)


READS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "np.asarray": ("jax", lambda x: np.asarray(x)),
    "np.array": ("jax", lambda x: np.array(x)),
    "__array__": ("jax", lambda x: x.__array__()),
    "torch.from_dlpack": ("jax", lambda x: torch.from_dlpack(x)),
    "tf.constant": ("jax", lambda x: tf.constant(x)),
    "np.asarray of TensorFlow": ("tensorflow", lambda x: np.asarray(x)),
    "numpy()": ("tensorflow", lambda x: x.numpy()),
    "jnp.asarray": ("tensorflow", lambda x: jnp.asarray(x)),
    "to_numpy": ("jax", lambda x: arraybridge.to_numpy(x)),
    "to_torch": ("jax", lambda x: arraybridge.to_torch(x)),
    "to_numpy of TensorFlow": ("tensorflow", lambda x: arraybridge.to_numpy(x)),
}


@pytest.mark.parametrize("what", READS)
def test_waiting_for_a_pending_computation_is_not_counted(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, read = READS[what]
    x = of_jax() if owner == "jax" else of_tensorflow()
    pending = Pending(monkeypatch, owner)
    with trace(foreign=True) as log:
        read(x)
    assert pending.now >= 100.0  # the wait was recorded
    assert [event.seconds for event in log.events] == [0.0] * len(log.events)
    assert log.events


def test_asynchronous_calls_do_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a traced program would no longer overlap its work."""
    x = of_jax()
    pending = Pending(monkeypatch, "jax")
    with trace(foreign=True):
        jax.device_put(x, jax.devices()[-1])
        jnp.asarray(x, "int32")
    assert pending.now == 0.0


FAILS = """
import jax, numpy as np, tensorflow as tf, arraybridge

def failing(x):
    raise KeyError("no such cell")

def error(read):
    shape = jax.ShapeDtypeStruct((4,), "float32")
    try:
        read(jax.jit(lambda x: jax.pure_callback(failing, shape, x))(np.ones(4, "f4")))
    except Exception as error:
        return type(error).__name__, "no such cell" in str(error)

for read in (lambda x: np.asarray(x), lambda x: tf.constant(x), lambda x: arraybridge.to_numpy(x)):
    plain = error(read)
    with arraybridge.trace(foreign=True):
        assert error(read) == plain, (error(read), plain)
    assert plain and plain[1], plain
"""


ASYNCHRONOUS = """
import arraybridge, tensorflow as tf, time

tf.config.experimental.set_synchronous_execution(False)
x = tf.ones((1500, 1500))
for read in (lambda x: x.numpy(), lambda x: arraybridge.to_numpy(x)):
    pending = x @ x @ x @ x
    with arraybridge.trace(foreign=True) as log:
        began = time.perf_counter()
        read(pending)
        took = time.perf_counter() - began
    (event,) = log.events
    assert event.seconds < took / 2, (event.seconds, took)
tf.config.experimental.set_synchronous_execution(True)
"""


def test_tensorflow_in_asynchronous_mode() -> None:
    """The computation takes a hundred times as long as the copy, on any machine."""
    done = run_python("-c", ASYNCHRONOUS, imported=True)
    assert done.returncode == 0, done.stderr


def test_a_failed_computation_raises_as_without_a_trace() -> None:
    done = run_python("-c", FAILS, imported=True)
    assert done.returncode == 0, done.stderr


def test_numpy_is_wrapped_again_after_the_import_of_the_compiler_has_failed() -> None:
    printed = output_of(
        "import importlib.util, sys",
        "import numpy as np, torch, arraybridge",
        "class Failing:",
        "    def find_spec(self, name, path=None, target=None):",
        "        return importlib.util.spec_from_loader(name, self) if name == 'torch._dynamo' else None",
        "    def create_module(self, spec):",
        "        return None",
        "    def exec_module(self, module):",
        "        raise ImportError('broken')",
        "sys.meta_path.insert(0, Failing())",
        "with arraybridge.trace(foreign=True) as log:",
        "    try:",
        "        import torch._dynamo",
        "    except ImportError as error:",
        "        print(error)",
        "    print(hasattr(np.asarray, '_original'))",
        "print(hasattr(np.asarray, '_original'))",
        imported=True,
    )
    assert printed == "broken\nTrue\nFalse"
