"""Decorated functions by plans: as the careful way, and no slower where torch.compile is only loaded."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import arraybridge
from arraybridge.conversion import plans
from tests.counting import functions_entered
from tests.helpers import require


class Pair(NamedTuple):
    left: Any
    right: Any


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "input": {"output_type": "input"},
    "strict": {"strict": True, "input_type": "numpy"},
    "recovery": {"oom_recovery": True},
    "split": {"oom_recovery": "split"},
    "device": {"device": "cpu"},
    "detach": {"grad": "detach"},
    "dtype": {"dtype": "float32"},
    "contract": {"contract": lambda result: result is not None},
    "keeps the dtype": {"dtype_conversion": arraybridge.DtypeConversion.PRESERVE_INPUT},
    "all": {
        "strict": True,
        "input_type": "numpy",
        "device": "cpu",
        "grad": "detach",
        "dtype": "float32",
        "oom_recovery": "split",
        "output_type": "input",
    },
}


def arrays() -> dict[str, Any]:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    frozen = x.copy()
    frozen.flags.writeable = False
    odd = np.zeros(25, np.uint8)[1:].view(np.float32)
    odd[:] = x.ravel()
    return {
        "aligned": x,
        "reversed": x[::-1],
        "transposed": x.T,
        "read-only": frozen,
        "big-endian": x.astype(">f4"),
        "unaligned": odd,
        "empty": x[:0],
        "float64": x.astype(np.float64),
        "bool": x > 2,
        "list": [x, x[::-1]],
        "dict": {"a": x, "b": (x.T, "word", 3)},
        "named tuple": Pair(x, frozen),
        "words": np.array(["a"]),
        "no array": 3.5,
        "objects": [x, np.array([None])],
    }


def forget() -> None:
    plans.by_form.clear()
    plans._decided.clear()


def told(call: Callable[[], Any]) -> Any:
    """What comes out: types, dtypes, shapes and elements, or the error."""

    def words(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: words(one) for key, one in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value), [words(one) for one in value]
        kind = f"{type(value).__module__}.{type(value).__name__}"
        if hasattr(value, "dtype"):
            return kind, str(value.dtype), tuple(value.shape), repr(np.asarray(value).tolist())
        return kind, value

    try:
        return words(call())
    except arraybridge.MemoryConversionError as error:
        return type(error), str(error)


@pytest.mark.parametrize("options", list(OPTIONS))
@pytest.mark.parametrize("framework", ["torch", "jax", "tensorflow", "numpy"])
def test_a_warm_call_gives_what_a_cold_one_gives(framework: str, options: str) -> None:
    require(framework)
    inside: list[Any] = []

    def body(value: Any) -> Any:
        inside.append(told(lambda: value))
        return value

    decorator = getattr(arraybridge, framework)
    fn = decorator(**{"output_type": "numpy", **OPTIONS[options]})(body)
    given = arrays()
    cold = {}
    for name, value in given.items():
        forget()
        inside.clear()
        cold[name] = told(lambda value=value: fn(value)), list(inside)
    # NumPy's own elements, that not both are wrong; what an option casts is float32, which holds them.
    for name in ("aligned", "reversed", "transposed", "read-only", "unaligned", "empty"):
        found = cold[name][0]
        assert found[0] == "numpy.ndarray", name
        assert found[1] == "float32"
        assert (found[2], found[3]) == (given[name].shape, repr(given[name].tolist())), name
    for _ in range(3):
        for name, value in given.items():
            inside.clear()
            assert (told(lambda value=value: fn(value)), inside) == cold[name], name


@pytest.mark.parametrize("options", ["plain", "strict", "recovery", "split", "device", "detach", "dtype"])
def test_torch_compile_that_is_loaded_and_not_at_work_slows_nothing(options: str) -> None:
    torch = require("torch")
    importlib.import_module("torch._dynamo")  # any optimiser loads it
    fn = arraybridge.torch(**{"output_type": "numpy", **OPTIONS[options]})(lambda x: x)
    x = np.ones(4, np.float32)
    for _ in range(2):
        fn(x)
    entered = functions_entered(lambda: fn(x))
    assert not [name for name in entered if name == "decide.py:decide"]
    assert isinstance(fn(torch.ones(2)) if options != "strict" else fn(x), np.ndarray)


def test_strict_looks_at_each_array_in_warm_calls_too() -> None:
    torch = require("torch")
    fn = arraybridge.torch(strict=True, input_type="numpy")(lambda x, y: x + y)
    loose = arraybridge.torch(lambda x: x)
    x = np.ones(2)
    for _ in range(3):
        loose(torch.ones(2))  # which has a plan from now on
        assert fn(x, x).tolist() == [2.0, 2.0]
        with pytest.raises(arraybridge.SourceMismatchError):
            fn(x, torch.ones(2))


@pytest.mark.parametrize("recovery", [True, "split"])
def test_nothing_of_a_planned_attempt_stays_until_the_next(recovery: Any) -> None:
    require("torch")
    brought: list[Any] = []
    alive: list[bool] = []

    def work(x: Any) -> Any:
        alive.extend(ref() is not None for ref in brought)
        brought.append(weakref.ref(x))
        made = x + 1  # what an attempt has made
        brought.append(weakref.ref(made))
        if len(brought) < 4:
            raise MemoryError
        return x

    fn = arraybridge.torch(oom_recovery=recovery, output_type="numpy")(work)
    plain = arraybridge.torch(output_type="numpy")(lambda x: x)
    x = np.arange(4.0)
    for _ in range(2):
        plain(x)  # from now on its arrays have a plan
    assert fn(x).tolist() == [0.0, 1.0, 2.0, 3.0]
    assert len(brought) == 4
    assert alive == [False, False]


@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_what_is_fixed_is_unpacked_in_warm_calls_too(framework: str) -> None:
    require(framework)
    seen: list[Any] = []

    def work(x: Any, beside: Any) -> Any:
        seen.append(beside)
        return {"x": x, "n": arraybridge.fixed(3)}

    fn = getattr(arraybridge, framework)(oom_recovery="split", output_type="numpy")(work)
    x = np.arange(4.0)
    for _ in range(3):
        for beside in (arraybridge.fixed(2), [arraybridge.fixed(2)], {"a": (x, arraybridge.fixed(2))}):
            found = fn(x, beside)
            assert (found["x"].tolist(), found["n"]) == ([0.0, 1.0, 2.0, 3.0], 3)
        assert seen[-3:-1] == [2, [2]]
        assert seen[-1]["a"][1] == 2


def test_a_batch_that_has_a_plan_is_split_where_it_does_not_fit() -> None:
    require("torch")
    rows: list[int] = []

    def work(x: Any) -> Any:
        rows.append(len(x))
        if len(x) > 2:
            raise MemoryError
        return x + 1

    fn = arraybridge.torch(oom_recovery="split", output_type="input", device="cpu")(work)
    for _ in range(3):
        rows.clear()
        found = fn(np.arange(4.0))
        assert type(found) is np.ndarray
        assert found.tolist() == [1.0, 2.0, 3.0, 4.0]
        assert rows == [4, 4, 2, 2]


class _PlugInError(Exception):
    """What a framework of somebody else's may raise where memory runs out."""


@pytest.mark.parametrize("kind", [MemoryError, _PlugInError])
@pytest.mark.parametrize("recovery", [True, "split"])
def test_memory_that_runs_out_in_a_planned_conversion_is_recovered_from(
    recovery: Any, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    numpy = arraybridge.framework("numpy")
    cast, failures, sizes = numpy.cast, [0], []

    def scarce(x: Any, dtype: str) -> Any:
        sizes.append(len(x))
        if failures[0] or (recovery == "split" and len(x) > 2):
            failures[0] = max(0, failures[0] - 1)
            raise kind("no memory")
        return cast(x, dtype)

    fn = arraybridge.numpy(dtype="float64", oom_recovery=recovery)(lambda x: x + 1)
    for _ in range(2):
        fn(np.arange(4, dtype=np.float32))  # from now on its arrays have a plan
    monkeypatch.setattr(numpy, "cast", scarce)
    monkeypatch.setattr(numpy, "is_oom", lambda error: isinstance(error, kind))
    for _ in range(2):
        failures[0] = 2 if recovery is True else 0
        sizes.clear()
        found = fn(np.arange(4, dtype=np.float32))
        assert found.dtype == np.float64
        assert found.tolist() == [1.0, 2.0, 3.0, 4.0]
        assert sizes[-2:] == ([4, 4] if recovery is True else [2, 2])
