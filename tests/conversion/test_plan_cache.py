"""Arrays that must be rejected or inspected, with any plans left by other arrays of their type.

test_matrix.py checks that plain arrays always end as `explain` predicts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import DtypeNotSupportedError, MemoryConversionError, convert_memory, explain
from arraybridge.conversion import plan_cache
from arraybridge.interface.framework import NoPlanError
from tests import matrix_data as data
from tests.helpers import require

OPTIONS: tuple[dict[str, Any], ...] = (
    *({}, {"copy": True}, {"copy": False}, {"device": "cpu"}, {"grad": "detach"}, {"dtype": "float32"}),
    {"copy": False, "device": "cpu", "grad": "detach"},
)


def needing_care(source: str) -> dict[str, Any]:
    """Return arrays that only some targets accept, or only after a change."""
    module = require(source)
    if source == "numpy":
        x = np.arange(6, dtype=np.float32).reshape(2, 3)
        return {
            "subclass": x.view(type("Sub", (np.ndarray,), {})),
            "overlapping": np.lib.stride_tricks.as_strided(x, (2, 2), (4, 4)),
            "high rank": np.ones((1,) * 32),  # NumPy 1 does not have it
            "borrowed": np.frombuffer(bytes(8), np.float32),
        }
    if source == "torch":
        leaf = module.ones(2, dtype=module.complex64, requires_grad=True)
        with module.inference_mode():
            inference = module.ones(3)
        return {
            "conj": leaf.detach().conj(),
            "neg": leaf.detach().conj().imag,
            "grad of a result": leaf.real * 2,
            "conj with grad": leaf.conj(),
            "parameter": module.nn.Parameter(module.ones(2)),
            "high rank": module.ones((1,) * 70),
            "subclass": module.ones(2).as_subclass(type("Sub", (module.Tensor,), {})),
            "inference": inference,
        }
    if source == "jax":
        return {
            "four bits": module.numpy.array([1, -2, 7], "int4"),
            "weak": module.numpy.asarray(2),
            "on the last": module.device_put(module.numpy.ones(3), module.devices("cpu")[-1]),
        }
    return {
        "variable": module.Variable([1.0, 2.0]),
        "quantized": module.cast(module.ones(3, module.int32), module.qint32),
        "high rank": module.ones((1,) * 20),
    }


def values(x: Any) -> Any:
    """Return comparable values: the bytes, or text for arrays without plain bytes."""
    if hasattr(x, "resolve_conj"):
        x = x.resolve_conj().resolve_neg()
    if data.dtype_name(x) == "int4":
        x = np.asarray(x).astype(np.int8)  # padding bytes next to its bits are undefined
    try:
        return data.bits(x)
    except (RuntimeError, AttributeError, TypeError):  # sparse tensors, variables and random keys
        return repr(x)


def outcome(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return the result of a call, or ``(class, message)`` of its exception."""
    try:
        return call(*arguments, **options)
    except (MemoryConversionError, ValueError, TypeError) as error:
        return (type(error), str(error))


@pytest.mark.filterwarnings("ignore:.*quantiz", "ignore:.*[Cc]omplex")
@pytest.mark.parametrize("target", data.FRAMEWORKS)
@pytest.mark.parametrize("source", ["numpy", "torch", "jax", "tensorflow"])
def test_unusual_arrays_end_as_explained_after_any_call(source: str, target: str) -> None:
    require(source)
    require(target)
    valueless = data.without_values(source)
    kinds = {**valueless, **needing_care(source)}
    plain = data.build(source, "aligned", "float32").array
    for options in OPTIONS:
        for kind, x in [*kinds.items(), *reversed(kinds.items())]:
            outcome(convert_memory, plain, target, **options)
            route = outcome(explain, x, target, **options)
            result = outcome(convert_memory, x, source, target, **options)
            where = f"{kind}, {options}: {route}"
            if isinstance(route, tuple) or isinstance(result, tuple):
                assert route == result, where
                assert issubclass(route[0], MemoryConversionError), where
                assert len(route[1]) > 20, where
                assert source != target or options, where
                continue
            cast = "dtype" in options
            assert (route.method == "same") == (result is x), where
            assert source == target or kind not in valueless or (kind == "longdouble" and cast), where
            before, after = values(x), values(result)
            if isinstance(before, bytes) and isinstance(after, bytes) and result is not x:
                assert before == after or cast, where
                assert (data.address(x) == data.address(result)) == route.shares_memory, where


def test_equal_options_of_other_types_are_distinguished() -> None:
    """1 equals True and ``tf.float32``, and 0.0 equals 0: invalid values keep raising."""
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


def test_unhashable_options_and_classes_made_in_a_loop() -> None:
    x = np.arange(3.0)
    unhashable = type("Unhashable", (str,), {"__hash__": None})("error")
    assert convert_memory(x, "numpy", grad=unhashable) is x
    for _ in range(600):
        made = x.view(type("Made", (np.ndarray,), {}))
        assert convert_memory(made, "numpy") is made


def replace_plans(monkeypatch: pytest.MonkeyPatch, plan: Callable[[Any], Any]) -> None:
    """Replace all plans for NumPy arrays."""
    for signature, by_type in list(plan_cache.plans_by_signature.items()):
        if callable(by_type.get(np.ndarray)):
            monkeypatch.setitem(plan_cache.plans_by_signature, signature, {np.ndarray: plan})


@pytest.mark.parametrize("error", [TypeError("bug"), ValueError("bug"), RuntimeError("bug"), KeyError("bug")])
def test_bugs_in_plans_and_fast_functions_are_not_hidden(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only `NoPlanError` leads to the slow path. Other errors would otherwise cost time and be never seen."""
    require("torch")
    x = np.arange(3.0)
    convert_memory(x, "torch")
    convert_memory(x, target="torch", device="cpu")

    def fail(x: Any) -> Any:
        raise error

    replace_plans(monkeypatch, fail)
    for call in (
        lambda: convert_memory(x, "torch"),
        lambda: convert_memory(x, target="torch", device="cpu"),
        lambda: arraybridge.torch(lambda t: t)(x),
    ):
        with pytest.raises(type(error), match="bug"):
            call()


def test_arrays_without_a_plan_take_the_slow_path(monkeypatch: pytest.MonkeyPatch) -> None:
    require("torch")
    x = np.arange(3.0)
    convert_memory(x, "torch")

    def decline(x: Any) -> Any:
        raise NoPlanError

    replace_plans(monkeypatch, decline)
    assert convert_memory(x, "torch").data_ptr() == x.ctypes.data


@pytest.mark.parametrize("target", ["numpy", "torch", "jax", "tensorflow"])
def test_numpy_scalars_are_planned(target: str) -> None:
    require(target)
    plan_cache.plans_by_signature.clear()
    for value in (np.float64(1.5), np.float64(-0.0), np.float64("nan")):
        array = convert_memory(value, target)
        assert convert_memory(array, "numpy").tobytes() == value.tobytes()
        assert np.float64 in plan_cache.plans_by_signature[target]
    first, second = (convert_memory(np.float64(1), "numpy") for _ in range(2))
    first[...] = 3
    assert second == 1
