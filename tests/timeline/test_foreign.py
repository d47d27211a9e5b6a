"""Conversions by the frameworks' own calls: each is seen with its line, and behaves as it did."""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import pickle
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import trace
from arraybridge.timeline import foreign
from arraybridge.timeline.events import Event
from tests.helpers import require, run_python

torch = require("torch")
jax = require("jax")
tf = require("tensorflow")
jnp = jax.numpy

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another test may have loaded it; here it does not work."""
    monkeypatch.setattr(foreign, "_COMPILER", "loaded by nobody")


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


def heard(call: Callable[[], Any]) -> list[Event]:
    """The foreign events of a call."""
    with trace(foreign=True) as log:
        call()
    return [event for event in log.events if event.kind == "foreign"]


doubles = partial(aligned, "float64")
of_torch = partial(torch.ones, 512, 512)
of_jax = partial(jnp.ones, (512, 512))
of_tensorflow = partial(tf.ones, (512, 512))


def of_variable() -> Any:
    return tf.Variable(of_tensorflow())


# The call by name, its argument, the call, and the frameworks.
SHARED: list[tuple[str, Callable[[], Any], Callable[[Any], Any], str]] = [
    ("torch.from_numpy", aligned, lambda x: torch.from_numpy(x), "numpy-torch"),
    ("torch.as_tensor", aligned, lambda x: torch.as_tensor(x), "numpy-torch"),
    ("torch.asarray", aligned, lambda x: torch.asarray(x), "numpy-torch"),
    ("torch.from_dlpack", aligned, lambda x: torch.from_dlpack(x), "numpy-torch"),
    ("torch.utils.dlpack.from_dlpack", of_jax, lambda x: torch.utils.dlpack.from_dlpack(x), "jax-torch"),
    ("Tensor.numpy", of_torch, lambda x: x.numpy(), "torch-numpy"),
    ("np.asarray", of_torch, lambda x: np.asarray(x), "torch-numpy"),
    ("np.asarray", of_jax, lambda x: np.asarray(x), "jax-numpy"),
    ("np.asarray", of_tensorflow, lambda x: np.asarray(x), "tensorflow-numpy"),
    ("np.from_dlpack", of_torch, lambda x: np.from_dlpack(x), "torch-numpy"),
    ("jnp.from_dlpack", of_torch, lambda x: jnp.from_dlpack(x), "torch-jax"),
    ("jax.dlpack.from_dlpack", of_torch, lambda x: jax.dlpack.from_dlpack(x), "torch-jax"),
    # Whose memory a capsule lends, it does not say.
    (
        *("tf.experimental.dlpack.from_dlpack", of_torch),
        *(lambda x: tf.experimental.dlpack.from_dlpack(x.__dlpack__()), "capsule-tensorflow"),
    ),
    (
        *("tf.experimental.dlpack.from_dlpack", of_jax),
        *(lambda x: tf.experimental.dlpack.from_dlpack(dlcapsule=x.__dlpack__()), "capsule-tensorflow"),
    ),
    (
        *("torch.from_dlpack", of_tensorflow),
        *(lambda x: torch.from_dlpack(tf.experimental.dlpack.to_dlpack(x)), "capsule-torch"),
    ),
]
COPY = "could be shared"
READ_ONLY = ("numpy-torch", "it is read-only", "arraybridge.to_torch(x, copy=False) shares it")
# Besides, a part of the reason, and of the advice.
COPIED: list[tuple[str, Callable[[], Any], Callable[[Any], Any], str, str, str]] = [
    ("torch.tensor", aligned, lambda x: torch.tensor(x), "numpy-torch", COPY, "torch.from_numpy(x)"),
    ("Tensor.to", of_torch, lambda x: x.to(torch.int32), "torch-torch", "a cast to int32", "in that dtype"),
    ("torch.tensor", lambda: aligned().T, lambda x: torch.tensor(x), "numpy-torch", COPY, "from_numpy(x)"),
    ("torch.tensor", read_only, lambda x: torch.tensor(x), *READ_ONLY),
    ("np.array", of_jax, lambda x: np.array(x), "jax-numpy", COPY, "np.asarray(x)"),
    ("jnp.asarray", aligned, lambda x: jnp.asarray(x), "numpy-jax", COPY, "arraybridge.to_jax(x) shares it"),
    ("jnp.asarray", unaligned, lambda x: jnp.asarray(x), "numpy-jax", "not aligned to 64", "aligned(shape"),
    ("jnp.array", doubles, lambda x: jnp.array(x), "numpy-jax", "narrowed from float64", "keeps all bits"),
    ("jax.device_put", unaligned, lambda x: jax.device_put(x), "numpy-jax", "not aligned", "aligned(shape"),
    ("tf.constant", aligned, lambda x: tf.constant(x), "numpy-tensorflow", COPY, "to_tensorflow(x)"),
    (
        *("tf.convert_to_tensor", aligned, lambda x: tf.convert_to_tensor(x)),
        *("numpy-tensorflow", COPY, "to_tensorflow(x)"),
    ),
    (
        *("tf.Tensor.numpy", of_tensorflow, lambda x: x.numpy()),
        *("tensorflow-numpy", COPY, "arraybridge.to_numpy(x) shares it"),
    ),
    (
        *("np.asarray", of_variable, lambda x: np.asarray(x)),
        *("tensorflow-numpy", COPY, "arraybridge.to_numpy(x) shares it"),
    ),
    (
        *("tf.Variable.numpy", of_variable, lambda x: x.numpy()),
        *("tensorflow-numpy", COPY, "arraybridge.to_numpy(x) shares it"),
    ),
]
ROWS = [(*row, 0, "same memory", "") for row in SHARED] + [(*row[:4], MIB, *row[4:]) for row in COPIED]


@pytest.mark.parametrize(
    ("name", "make", "call", "pair", "nbytes", "reason", "advice"),
    ROWS,
    ids=[f"{row[0]}-{row[3]}-{i}" for i, row in enumerate(ROWS)],
)
def test_each_call_is_seen(
    name: str, make: Any, call: Any, pair: str, nbytes: int, reason: str, advice: str
) -> None:
    x = make()
    with trace(foreign=True) as log:
        call(x)
    (event,) = log.events
    assert (event.kind, event.name, event.nbytes) == ("foreign", name, nbytes)
    assert f"{event.source}-{event.target}" == pair
    assert reason in event.reason
    assert event.file == __file__
    assert event.line in {line for _, _, line in call.__code__.co_lines()}
    assert event.seconds > 0
    (spot,) = log.hotspots()
    assert spot.nbytes == nbytes
    assert advice in spot.advice
    assert bool(advice) == bool(spot.advice)
    assert log.records == [], "records are of our own conversions"


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
def test_a_dtype_that_the_program_asks_for_is_no_narrowing(dtype: Any, reason: str) -> None:
    x = doubles()
    assert [e.reason for e in heard(lambda: jnp.asarray(x, dtype=dtype))] == [reason]
    assert [e.reason for e in heard(lambda: jnp.array(x, dtype))] == [reason]


def test_the_same_tensor_twice_is_told_once() -> None:
    x, others = aligned(), [aligned() for _ in range(3)]
    with trace(foreign=True) as log:
        for _ in range(3):
            jnp.asarray(x)
        for other in others:
            jnp.asarray(other)
    (first, second) = (spot.advice for spot in sorted(log.hotspots(), key=lambda spot: spot.line))
    assert "these 3 conversions convert the same array: convert it once, before the loop" in first
    assert "before the loop" not in second


def test_a_move_between_devices_of_jax() -> None:
    x = jnp.ones((512, 512))
    (event,) = heard(lambda: jax.device_put(x, jax.devices("cpu")[1]))
    assert (event.nbytes, event.device, event.reason) == (MIB, "cpu:1", "cpu:1 is another device than cpu")
    host = aligned()
    (event,) = heard(lambda: jax.device_put(host, jax.devices("cpu")[1]))
    assert (event.nbytes, event.device, event.reason) == (0, "cpu:1", "both see the same memory")


def test_arrays_that_several_devices_hold() -> None:
    x = jnp.ones((512, 512))
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:2]), ("rows",))
    by_rows, by_columns, alike = (
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
        for axes in (["rows"], [None, "rows"], [("rows",), None])
    )
    y = jax.device_put(x, by_rows)
    for array, sharding in ((x, by_rows), (y, by_columns), (y, x.sharding)):
        (event,) = heard(lambda array=array, sharding=sharding: jax.device_put(array, sharding))
        assert (event.nbytes, event.reason) == (MIB, "it is laid out anew over devices")
    for sharding in (by_rows, alike):
        assert heard(lambda sharding=sharding: jax.device_put(y, sharding)) == [], "it lies there already"
    (event,) = heard(lambda: jnp.asarray(y, dtype="int32"))
    assert (event.nbytes, event.reason) == (MIB, "it is a cast to int32")
    with trace(foreign=True) as log:
        np.asarray(y)
    ((event,), (spot,)) = log.events, log.hotspots()
    assert (event.nbytes, event.reason) == (MIB, "several devices hold a part of it each")
    assert "gather it where it is made" in spot.advice


def test_leaves_of_a_tree() -> None:
    events = heard(lambda: jax.device_put({"a": unaligned(), "b": [unaligned(), 3]}))
    assert [event.nbytes for event in events] == [MIB, MIB]


def test_pyclesperanto() -> None:
    cle = require("pyclesperanto")
    push, pull = cle.push, cle.pull
    with trace(foreign=True) as log:
        image = cle.push(np.ones((4, 4), np.float32))
        cle.pull(image)
    assert [(e.name, e.nbytes) for e in log.events] == [("cle.push", 64), ("cle.pull", 64)]
    assert cle.push is push
    assert cle.pull is pull


def test_capsules_into_pyclesperanto(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its CUDA backend alone has the call; a stand-in copies."""
    cle = require("pyclesperanto")
    stand_in = lambda producer: cle.push(np.from_dlpack(producer))  # noqa: E731  # no module's own function
    monkeypatch.setattr(cle, "from_dlpack", stand_in, raising=False)
    (event,) = heard(lambda: cle.from_dlpack(torch.ones(4, 4)))
    assert (event.name, event.source, event.nbytes) == ("cle.from_dlpack", "torch", 64)
    assert cle.from_dlpack is stand_in


# ---- what counts for nobody --------------------------------------------------------------------------


def test_nothing_is_seen_of() -> None:
    x, t = aligned(), torch.ones(4)
    assert heard(lambda: np.asarray(x)) == [], "no conversion"
    assert heard(lambda: np.asarray([1, 2])) == [], "lists"
    assert heard(lambda: torch.tensor(3.0)) == [], "numbers"
    assert heard(lambda: t.cpu()) == [], "it is there already"
    assert heard(lambda: repr(t.double())) == [], "what torch casts to print"
    assert heard(lambda: jax.jit(lambda y: jnp.asarray(y) + 1)(x)) == [], "traced values"
    assert heard(lambda: arraybridge.to_torch(aligned())) == [], "steps of ours"
    assert heard(lambda: tf.constant(["a"]).numpy()) == [], "words"
    assert heard(lambda: t.to("meta", torch.int32)) == [], "bytes that do not exist"
    with trace() as log:
        torch.from_numpy(x)
    assert not log.events, "a trace that does not ask"


def test_a_decorated_function_is_told_from_the_calls_in_it() -> None:
    @arraybridge.torch
    def f(y: Any) -> Any:
        return torch.tensor(y.numpy())

    with trace(foreign=True) as log:
        f(aligned())
    kinds = [(e.kind, e.name.rpartition(".")[2]) for e in log.events]
    assert ("foreign", "numpy") in kinds
    assert ("foreign", "tensor") in kinds
    assert [r.target for r in log.records] == ["torch", "torch"]


# ---- nothing behaves otherwise -----------------------------------------------------------------------


#: The functions, where programs find them.
FUNCTIONS: dict[Any, str] = {
    torch: "from_numpy tensor as_tensor asarray from_dlpack", tf: "constant convert_to_tensor",
    jnp: "asarray array from_dlpack", jax: "device_put", np: "asarray array asanyarray ascontiguousarray",
}  # fmt: skip


def every_call() -> dict[str, Any]:
    """The functions, and some methods, as they are now."""
    holders = {**FUNCTIONS, torch.Tensor: "numpy to cpu"}
    return {
        f"{holder.__name__}.{n}": getattr(holder, n) for holder in holders for n in holders[holder].split()
    }


def test_the_originals_come_back_on_every_exit() -> None:
    before = every_call()
    inherited = "numpy" in vars(torch.Tensor)
    with contextlib.suppress(KeyError), trace(foreign=True), trace(foreign=True):
        assert all(every_call()[name] is not call for name, call in before.items())
        raise KeyError
    assert all(every_call()[name] is call for name, call in before.items())
    assert ("numpy" in vars(torch.Tensor)) == inherited
    assert foreign._later not in sys.meta_path
    with trace():
        assert torch.from_numpy is before["torch.from_numpy"]


def test_traces_that_end_in_another_order() -> None:
    first, second = trace(foreign=True), trace(foreign=True)
    log_1, log_2 = first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    torch.tensor(aligned())
    second.__exit__(None, None, None)
    assert len(log_2.events) == 1
    assert not log_1.events
    assert every_call()["numpy.asarray"] is np.asarray


def test_the_wrapped_are_what_they_stand_for() -> None:
    originals = every_call()
    with trace(foreign=True):
        for name, call in every_call().items():
            original = originals[name]
            assert call == original, name
            assert hash(call) == hash(original), name
            assert {original: 1}[call] == 1, name
            assert call.__name__ == original.__name__, name
            assert call.__doc__ == original.__doc__, name
        assert inspect.signature(jnp.asarray) == inspect.signature(originals["jax.numpy.asarray"])
        assert pickle.loads(pickle.dumps(np.asarray)) == originals["numpy.asarray"]
        assert copy.copy(torch.tensor) == originals["torch.tensor"]
        kept = np.asarray
    assert kept([1, 2]).tolist() == [1, 2], "one that was kept goes on working"


# fmt: off
ARGUMENTS: list[Any] = [
    np.arange(6.0).reshape(2, 3), np.arange(6)[::-1], np.array(2.5), np.zeros((0, 3)), np.ones(3, ">f4"),
    np.ma.masked_array([1.0, 2.0], [True, False]), np.array(["a"]), np.array([None]), np.float32(3),
    [1, 2], (1.5,), 3, True, None, "word", b"bytes", {"a": 1}, range(3), object(), slice(2),
]
# fmt: on


def outcome(holder: Any, name: str, x: Any, options: dict[str, Any]) -> tuple[Any, ...]:
    """Type, dtype, shape, values and sharing of a result; or the error."""
    try:
        y = getattr(holder, name)(x, **options)
    except Exception as error:  # noqa: BLE001  # whatever it is, it has to be the same
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
            continue  # it reads a JAX array as flat float32
        if (
            getattr(holder, name) is torch.from_dlpack
            and isinstance(x, np.ndarray)
            and min((0, *x.strides)) < 0
        ):
            continue  # it ends the process (pytorch #188023)
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


def test_attributes_of_a_class_take_self_as_the_originals_do() -> None:
    with trace(foreign=True):

        class Reader:
            to_torch, to_jax = torch.from_numpy, jnp.asarray

            def __jax_array__(self) -> Any:
                return jnp.ones(2)

        assert Reader().to_torch(np.ones(3)).shape == (3,)
        assert Reader().to_jax().shape == (2,)


def test_autograd_and_subclasses() -> None:
    class Marked(torch.Tensor):  # type: ignore[misc]
        pass

    with trace(foreign=True):
        x = torch.ones(3, requires_grad=True)
        (x.to(torch.float64) * 2).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [2, 2, 2]
        assert type(torch.ones(2).as_subclass(Marked).to(torch.float64)) is Marked
        with pytest.raises(RuntimeError, match="requires grad"):
            x.numpy()


def test_a_program_that_listens_to_torch_hears_its_own_calls_alone() -> None:
    heard: list[str] = []

    class Tensor(torch.Tensor):  # type: ignore[misc]
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            heard.append(func.__name__)
            return super().__torch_function__(func, types, args, kwargs or {})

    class Mode(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            heard.append(func.__name__)
            return func(*args, **(kwargs or {}))

    x, plain = torch.ones(2).as_subclass(Tensor), torch.ones(2)
    with trace(foreign=True) as log:
        x.to(torch.float64)
        with Mode():
            plain.numpy()
    assert heard == ["to", "numpy"]
    assert len(log.events) == 2


def test_other_threads() -> None:
    logs: list[int] = []

    def work() -> None:
        with trace(foreign=True) as log:
            for _ in range(200):
                torch.tensor(np.ones(3))
        logs.append(len(log.events))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert logs == [200] * 4
    assert not isinstance(torch.tensor, foreign._Call)


COMPILED = """
import numpy as np
from arraybridge.conversion.trace import everywhere
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


def test_a_framework_that_is_imported_later_and_its_compilers() -> None:
    done = run_python("-W", "ignore", "-c", COMPILED, env={"PYTHONWARNINGS": "ignore"})
    assert done.stdout.strip() == "['np.asarray', 'torch.from_numpy']", done.stderr
