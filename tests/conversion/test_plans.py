"""A call ends as it did the first time, whatever came between, and as `explain` foretold.

Each array of the matrix, and what has to be refused or looked at with care, with each option: with nothing
planned, and through plans that other arrays of its type have left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from arraybridge import DtypeNotSupportedError, MemoryConversionError, convert_memory, explain
from arraybridge.conversion import plans
from tests import matrix_data as data
from tests.helpers import require

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
DTYPES = ("float32", "complex128", "bfloat16")


def strange_numpy() -> dict[str, Any]:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    return {
        **data.without_values("numpy"),
        "subclass": x.view(type("Sub", (np.ndarray,), {})),
        "overlapping": np.lib.stride_tricks.as_strided(x, (2, 2), (4, 4)),
        "high rank": np.ones((1,) * 32),  # NumPy 1 has no more
        "borrowed": np.frombuffer(bytes(8), np.float32),
    }


def strange_torch() -> dict[str, Any]:
    torch = require("torch")
    with torch.inference_mode():
        inference = torch.ones(3)
    return {
        **data.without_values("torch"),
        "conj": torch.tensor([1 + 2j, 3j]).conj(),
        "neg": torch.tensor([1 + 2j, 3j]).conj().imag,
        "grad": torch.ones(2, requires_grad=True),
        "grad of a result": torch.ones(2, requires_grad=True) * 2,
        "conj with grad": torch.ones(2, dtype=torch.complex64, requires_grad=True).conj(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "high rank": torch.ones((1,) * 70),
        "subclass": torch.ones(2).as_subclass(type("Sub", (torch.Tensor,), {})),
        "inference": inference,
    }


def strange_jax() -> dict[str, Any]:
    jax = require("jax")
    return {
        **data.without_values("jax"),
        "four bits": jax.numpy.array([1, -2, 7], "int4"),
        "weak": jax.numpy.asarray(2),
        "on the last": jax.device_put(jax.numpy.ones(3), jax.devices("cpu")[-1]),
    }


def strange_tensorflow() -> dict[str, Any]:
    tf = require("tensorflow")
    return {
        **data.without_values("tensorflow"),
        "variable": tf.Variable([1.0, 2.0]),
        "quantized": tf.cast(tf.ones(3, tf.int32), tf.qint32),
        "high rank": tf.ones((1,) * 20),
    }


STRANGE: dict[str, Callable[[], dict[str, Any]]] = {
    "numpy": strange_numpy,
    "torch": strange_torch,
    "jax": strange_jax,
    "tensorflow": strange_tensorflow,
    "pyclesperanto": dict,
}


def forget() -> None:
    plans.by_form.clear()
    plans._decided.clear()


def plain_arrays(source: str, target: str) -> Iterator[tuple[str, Any]]:
    for dtype in DTYPES:
        for layout in data.LAYOUTS:
            ends_the_process = source == target == "tensorflow" and layout in ("offset", "unaligned")
            if not data.inexpressible(source, layout, dtype) and not ends_the_process:
                yield f"{layout} {dtype}", data.build(source, layout, dtype).array


def call_of(x: Any, source: str, target: str, options: dict[str, Any]) -> Callable[[Callable[..., Any]], Any]:
    """A function that calls `convert_memory` or `explain` with these options."""
    options = dict(options)
    names = (source, target) if options.pop("source_type", None) else (target,)
    if options.get("dtype") is ...:
        strange = not hasattr(x, "dtype") or data.dtype_name(x) not in data.DTYPES
        options["dtype"] = "float32" if strange else data.dtype_name(x)
    return lambda do: do(x, *names, **options)


def values(x: Any) -> Any:
    """What compares: the bytes, or a word for what has no plain ones."""
    if hasattr(x, "resolve_conj"):
        x = x.resolve_conj().resolve_neg()
    if data.dtype_name(x) == "int4":
        x = np.asarray(x).astype(np.int8)  # what lies beside its bits is nobody's
    try:
        return data.bits(x)
    except (RuntimeError, AttributeError, TypeError):  # sparse tensors and random keys
        return repr(x)


def outcome(call: Callable[[Callable[..., Any]], Any], x: Any) -> tuple[Any, ...]:
    """What came of a conversion, in a form that compares: ``(class, message)`` for what was refused."""
    try:
        result = call(convert_memory)
    except (MemoryConversionError, ValueError, TypeError) as error:
        return (type(error), str(error))
    if result is x:
        return ("the very object", True, True)
    facts = (data.framework_of(result), values(result), getattr(result, "dtype", None), str(result.shape))
    has_memory = isinstance(facts[1], bytes) and facts[1] and data.address(result) is not None
    shared = data.address(result) == data.address(x) if has_memory else None
    return (facts, shared, result.flags.writeable if isinstance(result, np.ndarray) else None)


def foretold(call: Callable[[Callable[..., Any]], Any]) -> Any:
    try:
        return call(explain)
    except (MemoryConversionError, ValueError, TypeError) as error:
        return (type(error), str(error))


@pytest.mark.filterwarnings(
    "ignore:.*quantiz", "ignore:.*imaginary", "ignore:.*[Cc]omplex", "ignore:overflow"
)
@pytest.mark.parametrize("target", data.FRAMEWORKS)
@pytest.mark.parametrize("source", data.FRAMEWORKS)
def test_what_was_called_before_changes_nothing(source: str, target: str) -> None:
    require(source)
    require(target)
    strange = STRANGE[source]()
    valueless = set(data.without_values(source)) if source != "pyclesperanto" else set()
    sources = [*plain_arrays(source, target), *strange.items()]
    for name, options in OPTIONS.items():
        calls = {kind: (call_of(x, source, target, options), x) for kind, x in sources}
        cold = {}
        for kind, (call, x) in calls.items():
            forget()
            route, cold[kind] = foretold(call), outcome(call, x)
            where = f"{kind}, {name}: {route} {cold[kind]}"
            if source == target and not options:
                assert cold[kind][0] == "the very object", where
            if source == target and "dtype" in options and kind in strange:
                continue  # whether its own cast succeeds, a framework says itself
            if isinstance(route, tuple) or len(cold[kind]) == 2:
                assert route == cold[kind], where
                assert issubclass(route[0], MemoryConversionError), where
                assert len(route[1]) > 20, where
            else:
                assert (route.method == "same") == (cold[kind][0] == "the very object"), where
                assert cold[kind][1] in (None, route.shares_memory), where
                cast = kind == "longdouble" and "dtype" in options  # numbers that a cast brings over
                assert source == target or kind not in valueless or cast, where
        for kind, (call, x) in [*calls.items(), *reversed(calls.items())]:
            assert outcome(call, x) == cold[kind], f"{kind}, {name}: at first {cold[kind]}"


def test_equal_options_are_no_trap() -> None:
    """1 equals True and ``tf.float32``, and 0.0 equals 0: what is refused at first is refused later."""
    torch, tf = require("torch"), require("tensorflow")
    x = np.arange(3.0)
    refused: tuple[dict[str, Any], ...] = (
        *({"copy": 1}, {"copy": np.array(True)}, {"copy": "no"}),
        *({"gpu_id": True}, {"gpu_id": 0.0}, {"device": 0}, {"device": "cpu:0 "}),
    )
    for _ in range(3):
        assert convert_memory(x, "torch", dtype=tf.float32).dtype is torch.float32
        assert convert_memory(x, "torch", copy=np.True_).data_ptr() != x.ctypes.data
        assert convert_memory(x, "torch", copy=np.False_).data_ptr() == x.ctypes.data
        convert_memory(x, "torch", copy=True)
        convert_memory(x, "numpy", 0)
        for call in (convert_memory, explain):
            for options in refused:
                with pytest.raises(ValueError, match=next(iter(options))):
                    call(x, "torch", **options)
            for number in (True, 0.0, -1):
                with pytest.raises(ValueError, match="gpu_id"):
                    call(x, "numpy", number)
            for dtype in (1, True, 1.0, [("a", "i4")]):
                with pytest.raises(DtypeNotSupportedError):
                    call(x, "torch", dtype=dtype)


def test_classes_made_in_a_loop_do_not_pile_up() -> None:
    x = np.arange(3.0)
    for _ in range(600):
        made = x.view(type("Made", (np.ndarray,), {}))
        assert convert_memory(made, "numpy") is made
        assert convert_memory(made, "numpy", copy=True) is not made
    assert max(map(len, (plans.by_form, plans._decided, *plans.by_form.values()))) <= 512
    # Nor is what cannot be a key one.
    options = type("Unhashable", (str,), {"__hash__": None})("error")
    assert convert_memory(x, "numpy", grad=options) is x
