"""A plan and `explain` never disagree: every array of the matrix, with every option, cold and warm.

A call is made in four ways: with nothing planned; after itself; after plans of other arrays of its type; and
with a trace open, which takes the careful path. All four end alike: the same refusal, or the same values,
dtype, shape, device and sharing, as `explain` foretold.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import DtypeNotSupportedError, MemoryConversionError, convert_memory, explain
from arraybridge.conversion import plans
from tests import matrix_data as data
from tests.helpers import require

# What a cast to float32 leaves out is what was asked for.
pytestmark = pytest.mark.filterwarnings("ignore:.*imaginary", "ignore:.*[Cc]omplex", "ignore:overflow")

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "copy": {"copy": True},
    "no copy": {"copy": False},
    "declared": {"source_type": ...},
    "device": {"device": "cpu"},
    "detach": {"grad": "detach"},
    "its dtype": {"dtype": ...},
    "float32": {"dtype": "float32"},
    "all": {"source_type": ..., "copy": False, "device": "cpu", "grad": "detach", "dtype": ...},
}


def forget() -> None:
    plans.by_form.clear()
    plans._decided.clear()


def call_of(
    array: Any, source: str, target: str, options: dict[str, Any]
) -> Callable[[Callable[..., Any]], Any]:
    """A function that calls `convert_memory` or `explain` with these options."""
    chosen = dict(options)
    if "source_type" in chosen:
        chosen["source_type"] = source
    if chosen.get("dtype") is ...:
        chosen["dtype"] = data.dtype_name(array)
    if chosen.pop("source_type", None) is not None:
        return lambda do: do(array, source, target, **chosen)
    return lambda do: do(array, target, **chosen)


def outcome(call: Callable[[Callable[..., Any]], Any], array: Any) -> tuple[Any, ...]:
    """What came of it, in a form that compares."""
    try:
        result = call(convert_memory)
    except (MemoryConversionError, ValueError, TypeError) as error:
        return (type(error), str(error))
    if result is array:
        return ("same",)
    address = data.address(result)
    shared = bool(data.bits(result)) and address is not None and address == data.address(array)
    writable = result.flags.writeable if isinstance(result, np.ndarray) else None
    return (
        data.framework_of(result),
        data.dtype_name(result),
        tuple(result.shape),
        data.device_word(result),
        data.bits(result),
        shared,
        writable,
    )


def foretold(call: Callable[[Callable[..., Any]], Any]) -> tuple[Any, ...]:
    try:
        route = call(explain)
    except (MemoryConversionError, ValueError, TypeError) as error:
        return (type(error), str(error))
    return (route.method == "same", route.shares_memory, route.copies == 0)


def check(call: Callable[[Callable[..., Any]], Any], array: Any, where: str) -> None:
    forget()
    told = foretold(call)
    cold = outcome(call, array)
    assert foretold(call) == told, f"{where}: explain changed its mind"
    results = {"warm": outcome(call, array), "warmer": outcome(call, array)}
    with arraybridge.trace() as log:
        results["traced"] = outcome(call, array)
    results["after the trace"] = outcome(call, array)
    for when, result in results.items():
        assert result == cold, f"{where}: cold {cold[:-3]}, {when} {result[:-3]}"
    if len(told) == 2:
        assert cold == told, f"{where}: explain says {told}, the call {cold}"
        return
    same, shares, _ = told
    assert same == (cold == ("same",)), where
    if cold != ("same",):
        assert len(cold) == 7, f"{where}: explain foretold {told}, the call {cold}"
        if cold[4]:
            assert shares == cold[5], f"{where}: explain says shares={shares}, really {cold[5]}"
    assert len(log.records) == 1
    assert (log.records[0].method == "same", log.records[0].shares_memory) == (same, shares), where


def sources(framework: str, dtype: str) -> Iterator[tuple[str, Any]]:
    for layout in data.LAYOUTS:
        if not data.inexpressible(framework, layout, dtype):
            yield layout, data.build(framework, layout, dtype)


SOME = ("float32", "complex128", "bfloat16", "bool", "int64", "float8_e5m2")


@pytest.mark.parametrize("target", data.FRAMEWORKS)
@pytest.mark.parametrize("source", data.FRAMEWORKS)
def test_plans_of_other_arrays_change_nothing(source: str, target: str) -> None:
    """All arrays of a framework one after the other, through the same plans, there and back."""
    require(source)
    require(target)
    made = [(dtype, layout, one) for dtype in SOME for layout, one in sources(source, dtype)]
    made = [
        one for one in made if not (source == target == "tensorflow" and one[1] in ("offset", "unaligned"))
    ]
    for name, options in OPTIONS.items():
        calls = [
            (f"{layout} {dtype} {name}", call_of(one.array, source, target, options), one.array)
            for dtype, layout, one in made
        ]
        cold = []
        for where, call, array in calls:
            check(call, array, where)
            forget()
            cold.append(outcome(call, array))
        for order in (calls, calls[::-1]):
            found = {where: outcome(call, array) for where, call, array in order}
            for (where, _, _), before in zip(calls, cold, strict=True):
                assert found[where] == before, f"{where}: {before[:-3]} became {found[where][:-3]}"


# ---- arrays that the matrix does not have ------------------------------------------------------------------


def strange_numpy() -> dict[str, Any]:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    shrunk = np.arange(4, dtype=np.float32)
    view = shrunk[:2]
    frozen = x.copy()
    frozen.flags.writeable = False
    return {
        "masked": np.ma.masked_array(x, x > 2),
        "object": np.array([1, "a", None], object),
        "words": np.array(["a", "bc"]),
        "bytes": np.array([b"a", b"bc"]),
        "dates": np.array(["2020-01-01"], "datetime64[D]"),
        "structured": np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]),
        "void": np.zeros(2, "V3"),
        "long double": np.zeros(2, np.longdouble),
        "record": np.rec.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]),
        "subclass": x.view(type("Sub", (np.ndarray,), {})),
        "matrix": np.asmatrix(x),
        "frozen": frozen,
        "spread": np.broadcast_to(np.float32(1), (2, 3)),
        "overlapping": np.lib.stride_tricks.as_strided(x, (2, 2), (4, 4)),
        "reversed": x[::-1, ::-1],
        "unaligned": np.zeros(13, np.uint8)[1:].view(np.float32),
        "no axes": np.array(3.0),
        "empty": x[:, :0],
        "high rank": np.ones((1,) * 32),  # NumPy 1 has no more
        "part of another": view,
        "borrowed": np.frombuffer(bytes(8), np.float32),
    }


def strange_torch() -> dict[str, Any]:
    torch = require("torch")
    with torch.inference_mode():
        inference = torch.ones(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces beta and deprecated layouts
        return {
            "conj": torch.tensor([1 + 2j, 3j]).conj(),
            "neg": torch.tensor([1 + 2j, 3j]).conj().imag,
            "grad": torch.ones(2, requires_grad=True),
            "parameter": torch.nn.Parameter(torch.ones(2)),
            "grad of a result": torch.ones(2, requires_grad=True) * 2,
            "conj with grad": torch.ones(2, dtype=torch.complex64, requires_grad=True).conj(),
            "sparse": torch.ones(2, 2).to_sparse(),
            "sparse rows": torch.eye(3).to_sparse_csr(),
            "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
            "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
            "mkldnn": torch.ones(3, 3).to_mkldnn(),
            "four bits": torch.zeros(4, dtype=torch.uint8).view(torch.uint4),
            "expanded": torch.ones(1).expand(5),
            "empty": torch.ones(0, 3),
            "one": torch.ones(1, 1)[:, :1],
            "high rank": torch.ones((1,) * 70),
            "subclass": torch.ones(2).as_subclass(type("Sub", (torch.Tensor,), {})),
            "inference": inference,
            "bfloat16": torch.ones(3, dtype=torch.bfloat16),
        }


def strange_jax() -> dict[str, Any]:
    jax = require("jax")
    return {
        "four bits": jax.numpy.array([1, -2, 7], "int4"),
        "key": jax.random.key(0),
        "bfloat16": jax.numpy.ones(3, "bfloat16"),
        "no axes": jax.numpy.float32(2),
        "empty": jax.numpy.ones((2, 0)),
        "weak": jax.numpy.asarray(2),
        "transposed": jax.numpy.ones((2, 3)).T,
        "on the second": jax.device_put(jax.numpy.ones(3), jax.devices("cpu")[-1]),
    }


def strange_tensorflow() -> dict[str, Any]:
    tf = require("tensorflow")
    return {
        "words": tf.constant(["a", "b"]),
        "variable": tf.Variable([1.0, 2.0]),
        "no axes": tf.constant(2.0),
        "empty": tf.ones((2, 0)),
        "bfloat16": tf.ones(3, tf.bfloat16),
        "quantized": tf.cast(tf.ones(3, tf.int32), tf.qint32),
        "high rank": tf.ones((1,) * 20),
    }


STRANGE = {
    "numpy": strange_numpy,
    "torch": strange_torch,
    "jax": strange_jax,
    "tensorflow": strange_tensorflow,
}


@pytest.mark.filterwarnings("ignore:.*quantiz.*", "ignore:.*matrix subclass")
@pytest.mark.parametrize("target", data.FRAMEWORKS)
@pytest.mark.parametrize("source", STRANGE)
def test_strange_arrays(source: str, target: str) -> None:
    """What has to be refused or looked at with care, cold, warm, and after a plan for plain arrays."""
    for name in (source, target):
        require(name)
    plain = convert_memory(np.ones(2, np.float32), source, copy=True)
    for (kind, x), (name, options) in product(STRANGE[source]().items(), OPTIONS.items()):
        if options.get("dtype") is ...:
            options = {**options, "dtype": "float32"}  # noqa: PLW2901
        call = call_of(x, source, target, options)
        forget()
        told = foretold(call)
        first = _compared(call)
        again = _compared(call)
        if source == target and not options:
            assert convert_memory(x, target) is x, kind
        convert_memory_quietly(plain, source, target, options)
        assert _compared(call) == first == again, f"{kind} {name}"
        if (
            source != target or "dtype" not in options
        ):  # whether its own cast succeeds, a framework says itself
            assert (len(told) == 2) == (len(first) == 2), f"{kind} {name}: {told} {first}"


def convert_memory_quietly(x: Any, source: str, target: str, options: dict[str, Any]) -> None:
    try:
        call_of(x, source, target, options)(convert_memory)
    except MemoryConversionError:
        return


def _compared(call: Callable[[Callable[..., Any]], Any]) -> tuple[Any, ...]:
    try:
        result = call(convert_memory)
    except (MemoryConversionError, ValueError, TypeError) as error:
        return (type(error), str(error))
    if hasattr(result, "resolve_conj"):
        result = result.resolve_conj().resolve_neg()
    if data.dtype_name(result) == "int4":
        result = np.asarray(result).astype(np.int8)  # what lies beside its bits is nobody's
    try:
        bits = data.bits(result)
    except (RuntimeError, AttributeError, TypeError):  # sparse tensors and random keys have no plain bytes
        return ("without bytes", str(type(result)), repr(result))
    return (data.framework_of(result), data.dtype_name(result), tuple(result.shape), bits)


@pytest.mark.parametrize("never", [False, np.False_])
def test_what_must_not_be_copied_is_not_copied_by_a_plan(never: Any) -> None:
    """A scalar of JAX is copied on its way to torch, unless ``copy=False``."""
    jax = require("jax")
    require("torch")
    for x in (jax.numpy.arange(3.0), jax.numpy.float32(2)):
        for _ in range(3):
            assert convert_memory(x, "torch", copy=never).data_ptr() == x.unsafe_buffer_pointer()


@pytest.mark.parametrize("call", [convert_memory, explain])
def test_equal_dtypes_are_no_trap(call: Callable[..., Any]) -> None:
    """``tf.float32 == 1``, and both are equal keys."""
    torch, tf = require("torch"), require("tensorflow")
    x = np.arange(3.0)
    for _ in range(3):
        assert convert_memory(x, "torch", dtype=tf.float32).dtype is torch.float32
        for dtype in (1, True, 1.0):
            with pytest.raises(DtypeNotSupportedError):
                call(x, "torch", dtype=dtype)


def test_equal_keys_are_no_trap() -> None:
    """1 equals True, and 0.0 equals 0: what is refused cold is refused warm."""
    require("torch")
    x = np.arange(3.0)
    for _ in range(3):
        convert_memory(x, "torch", copy=True)
        assert convert_memory(x, "torch", copy=np.True_).data_ptr() != x.ctypes.data
        assert convert_memory(x, "torch", copy=np.False_).data_ptr() == x.ctypes.data
        convert_memory(x, "numpy", 0)
        convert_memory(x, "numpy", "numpy", 0)
        for options in (
            {"copy": 1},
            {"copy": np.array(True)},
            {"copy": "no"},
            {"gpu_id": True},
            {"gpu_id": 0.0},
            {"device": 0},
            {"device": "cpu:0 "},
        ):
            with pytest.raises(ValueError, match=next(iter(options))):
                convert_memory(x, "torch", **options)
        for number in (True, 0.0, -1):
            with pytest.raises(ValueError, match="gpu_id"):
                convert_memory(x, "numpy", number)


def test_an_option_that_is_no_key_is_refused_and_not_more() -> None:
    class Unhashable(str):  # noqa: SLOT000
        __hash__ = None  # type: ignore[assignment]

    require("torch")
    x = np.arange(3.0)
    for _ in range(2):
        assert convert_memory(x, "torch", grad=Unhashable("error")).tolist() == [0, 1, 2]
        with pytest.raises(MemoryConversionError):
            convert_memory(x, "torch", dtype=[("a", "i4")])


def test_classes_made_in_a_loop_do_not_pile_up() -> None:
    x = np.arange(3.0)
    for _ in range(600):
        cls = type("Made", (np.ndarray,), {})
        convert_memory(x.view(cls), "numpy", copy=True)
        convert_memory(x.view(cls), "numpy")
    assert max(map(len, (plans.by_form, plans._decided, *plans.by_form.values()))) <= 512


def test_a_framework_that_is_replaced_is_asked_anew() -> None:
    from tests.helpers import registry_kept

    x = np.arange(3.0)
    convert_memory(x, "numpy", copy=True)
    assert plans.by_form
    with registry_kept():
        arraybridge.register(arraybridge.framework("numpy"))
        assert not plans.by_form
        assert not plans._decided


@pytest.mark.parametrize("moment", ["_fast", "_rests_on_facts", "_planned"])
def test_a_framework_that_another_thread_registers_meanwhile_breaks_no_conversion(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was known is forgotten in the midst of keeping more."""
    real = getattr(plans, moment)

    def forgetting(*given: Any) -> Any:
        forget()
        return real(*given)

    forget()
    monkeypatch.setattr(plans, moment, forgetting)
    x = np.arange(3.0)
    for _ in range(2):
        assert convert_memory(x, "numpy") is x
        assert convert_memory(x, "numpy", copy=True).tolist() == [0.0, 1.0, 2.0]


def test_an_array_of_another_library_that_comes_first_slows_none_of_numpy() -> None:
    require("torch")

    class Foreign:
        def __init__(self) -> None:
            self.held = np.arange(3.0, dtype=np.float32)
            self.__array_interface__ = self.held.__array_interface__

    plans.by_form.clear()
    for x in (Foreign(), np.arange(3.0, dtype=np.float32)):
        assert convert_memory(x, "torch").tolist() == [0.0, 1.0, 2.0]
    assert np.ndarray in plans.by_form["torch"]
