"""The decorator option ``x64``, and the warning if it is missing."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge.decorators import argument_conversion
from tests.helpers import output_of, require

X = np.array([1.0, 1e-12])


@pytest.mark.parametrize("form", ["function", "method", "planes", "container", "no array", "device"])
def test_x64_is_on_during_the_call_only(form: str) -> None:
    jax = require("jax")
    on_cpu = {"device": "cpu"}
    options = {"planes": {"slice_by_slice": True}, "device": on_cpu, "no array": on_cpu}.get(form, {})

    def total(x: Any = None) -> Any:
        array = jax.numpy.ones(2) if x is None else x["x"] if isinstance(x, dict) else x
        return (array + jax.numpy.asarray(1e-12)).reshape(-1)[:1]

    class Model:
        @arraybridge.jax(x64=True)
        def total(self, x: Any) -> Any:
            return total(x)

    decorated = Model().total if form == "method" else arraybridge.jax(x64=True, **options)(total)
    arguments: list[Any] = {"planes": [X[None, None]], "container": [{"x": X}], "no array": []}.get(form, [X])
    for _ in range(3):
        result = decorated(*arguments)
        assert result.dtype == "float64"
        assert np.asarray(result).ravel()[0] == 1 + 1e-12
        assert jax.numpy.arange(2.0).dtype == "float32"


def test_x64_can_be_off_during_a_call() -> None:
    jax = require("jax")
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64(True):
        on = arraybridge.jax(lambda x: (jax.numpy.zeros(2) + x).dtype)
        off = arraybridge.jax(x64=False)(lambda x: (jax.numpy.zeros(2) + x).dtype)
        x = np.ones(2, np.float32)
        assert (on(x), off(x), on(x)) == ("float64", "float32", "float64")


def test_x64_and_split_recovery() -> None:
    require("jax")

    @arraybridge.jax(x64=True, oom_recovery="split", output_type="numpy")
    def add(x: Any) -> Any:
        if len(x) > 1:
            raise MemoryError
        return x + 1e-12

    result = add(np.ones(3))
    assert result.dtype == "float64"
    assert result.tolist() == [1 + 1e-12] * 3


def test_x64_and_gradients() -> None:
    jax, torch = require("jax"), require("torch")
    weights = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    f = arraybridge.jax(grad="flow", x64=True)(lambda w: jax.numpy.sin(w).sum())
    f(weights).backward()
    np.testing.assert_allclose(weights.grad.numpy(), np.cos([1.0, 2.0]), rtol=1e-15)
    assert not jax.config.jax_enable_x64


def test_x64_under_jit() -> None:
    jax = require("jax")
    f = arraybridge.jax(x64=True)(lambda x: x * 2)
    assert jax.jit(f)(jax.numpy.ones(2)).tolist() == [2.0, 2.0]


@pytest.mark.parametrize("name", ["numpy", "torch", "tensorflow"])
def test_other_frameworks_have_no_x64(name: str) -> None:
    with pytest.raises(TypeError, match=rf"^@{name} has no option 'x64'.* contract, grad, stream\.$"):
        getattr(arraybridge, name)(x64=True)
    with pytest.raises(TypeError, match="x64=1 must be True or False"):
        arraybridge.jax(x64=1)


# -- the warning ---------------------------------------------------------------------------------------


@pytest.fixture
def _first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do as if this process had not emitted the warning yet."""
    monkeypatch.setattr(argument_conversion, "_functions_with_warning", [])


def emitted(fn: Any, *args: Any) -> list[str]:
    """Return the texts of the warnings of this package that two calls emit."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            fn(*args)
    return [str(one.message) for one in caught if "while x64 is off" in str(one.message)]


@pytest.mark.usefixtures("_first_call")
@pytest.mark.parametrize("dtype", ["float64", "int64", "uint64", "complex128"])
@pytest.mark.parametrize("form", ["numpy", "torch", "jax", "container", "device"])
def test_a_64_bit_argument_warns_once(form: str, dtype: str) -> None:
    require("jax")
    x: Any = np.ones(2, dtype)
    if form in ("torch", "jax"):
        require(form)
        x = arraybridge.convert_memory(x, form)
    options = {"device": "cpu"} if form == "device" else {}

    def sum_of(x: Any) -> Any:
        return x

    decorated = arraybridge.jax(**options)(sum_of)
    (text,) = emitted(decorated, {"x": [x]} if form == "container" else x)
    assert text.startswith(f"test_a_64_bit_argument_warns_once.<locals>.sum_of() received {dtype}, but jax ")
    assert "Write @jax(x64=True) to compute in 64 bits, or @jax(x64=False) to omit this warning" in text
    assert emitted(arraybridge.jax(lambda x: x), x) == []


@pytest.mark.usefixtures("_first_call")
def test_nothing_is_narrowed_so_nothing_warns() -> None:
    jax, torch = require("jax"), require("torch")
    for options in ({"x64": True}, {"x64": False}, {"dtype": "float32"}, {"dtype": "float64"}):
        assert emitted(arraybridge.jax(**options)(lambda x: x), X) == []
    narrow = (np.ones(2, np.float32), np.ones(2, np.complex64), np.ones(2, bool), torch.ones(2), 3, "text")
    for x in (*narrow, jax.random.key(0), jax.numpy.ones(2)):
        assert emitted(arraybridge.jax(lambda x: x), x) == []
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64(True):
        assert emitted(arraybridge.jax(lambda x: x), X) == []
    assert emitted(arraybridge.torch(lambda x: x), X) == []
    assert emitted(jax.jit(arraybridge.jax(lambda x: x)), jax.numpy.ones(2)) == []


def test_the_warning_names_the_line_of_the_user() -> None:
    require("jax")
    printed = output_of(
        "import warnings, numpy as np, arraybridge",
        "warnings.simplefilter('always')",
        "with warnings.catch_warnings(record=True) as caught:",
        "    arraybridge.jax(lambda x: x)(np.ones(2))",
        "print(len(caught), caught[0].category.__name__, caught[0].lineno, caught[0].filename)",
        imported=True,
    )
    assert printed == "1 UserWarning 4 <string>"
