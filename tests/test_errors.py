"""Every error: what it derives from, what it carries, and whether its message helps."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import (
    ArrayNotSupportedError,
    CopyRequiredError,
    DeviceNotFoundError,
    DtypeNotSupportedError,
    FrameworkNotInstalledError,
    GradientError,
    MemoryConversionError,
    SourceMismatchError,
    UnknownArrayError,
    UnknownFrameworkError,
    convert_memory,
)
from arraybridge.errors import say_in
from tests.helpers import require

BASES: dict[type[Exception], tuple[type[Exception], ...]] = {
    MemoryConversionError: (Exception,),
    FrameworkNotInstalledError: (MemoryConversionError, ImportError),
    DeviceNotFoundError: (MemoryConversionError, ValueError),
    DtypeNotSupportedError: (MemoryConversionError, TypeError),
    CopyRequiredError: (MemoryConversionError, ValueError),
    GradientError: (MemoryConversionError, RuntimeError),
    UnknownArrayError: (MemoryConversionError, TypeError, ValueError),
    ArrayNotSupportedError: (MemoryConversionError,),
    SourceMismatchError: (MemoryConversionError,),
    UnknownFrameworkError: (MemoryConversionError, ValueError),
}


@pytest.mark.parametrize("cls", BASES)
def test_an_error_is_what_its_handlers_expect_and_survives_pickling(cls: Any) -> None:
    assert all(issubclass(cls, base) for base in BASES[cls])
    bare = cls("text")
    assert (bare.source_type, bare.target_type, bare.method, bare.reason) == ("", "", "", "text")
    assert str(cls()) == ""
    error = cls(
        "what; why; what to do", source_type="numpy", target_type="jax", method="dlpack", reason="why"
    )
    error.add_note("at tree['a']")
    for twin in (*(pickle.loads(pickle.dumps(error, n)) for n in range(2, 6)), copy.copy(error)):
        assert type(twin) is cls
        assert (str(twin), twin.__notes__) == ("what; why; what to do", ["at tree['a']"])
        assert vars(twin) == vars(error)
        assert (twin.source_type, twin.method, twin.reason) == ("numpy", "dlpack", "why")


# ---- each error as a user meets it -----------------------------------------------------------------------


def requires_grad() -> Any:
    return require("torch").ones(2, requires_grad=True)


DTYPE, ANY = DtypeNotSupportedError, MemoryConversionError
#: The array, the target, the options; the error, a part of why, and a part of what to do.
MET: dict[str, tuple[Any, str, dict[str, Any], type[Exception], str, str]] = {
    "strings": (np.array(["a"]), "torch", {}, DTYPE, "<U1", "numbers"),
    "objects": (np.array([None]), "torch", {}, DTYPE, "object", "numeric"),
    "dates": (np.array(["2020"], "M8[D]"), "torch", {}, DTYPE, "datetime64", 'x.view("int64")'),
    "structured": (np.zeros(1, [("a", "i4")]), "torch", {}, DTYPE, "'a'", 'x["field"]'),
    "masked": (np.ma.masked_array([1.0], [True]), "torch", {}, ANY, "mask", "filled"),
    "long double": (np.zeros(1, "g"), "torch", {}, DTYPE, np.dtype("g").name, "dtype="),
    "float64 to OpenCL": (np.zeros(1), "pyclesperanto", {}, DTYPE, "float64", "float32"),
    "bool to OpenCL": (np.zeros(1, bool), "pyclesperanto", {}, DTYPE, "bool", "uint8"),
    "4-D to OpenCL": (np.zeros((1, 1, 1, 1), "f4"), "pyclesperanto", {}, ANY, "(1, 1, 1, 1)", "plane"),
    "must copy": (np.arange(3)[::-1], "torch", {"copy": False}, CopyRequiredError, "negative", "copy=None"),
    "no such device": (np.zeros(1), "torch", {"gpu_id": 99}, DeviceNotFoundError, "gpu:99", "cpu"),
    "graph": (requires_grad, "numpy", {}, GradientError, "requires grad", "detach"),
    "no array": ([1, 2], "torch", {}, UnknownArrayError, "list", "np.asarray()"),
    "unknown dtype": (np.zeros(1), "torch", {"dtype": "float31"}, DTYPE, "float31", "float32"),
}


@pytest.mark.parametrize("what", MET)
def test_a_message_says_what_why_and_what_to_do(what: str) -> None:
    array, target, options, cls, why, advice = MET[what]
    require(target)
    array = array() if callable(array) else array
    with pytest.raises(cls) as caught:
        convert_memory(array, target, **options)
    error = caught.value
    assert isinstance(error, MemoryConversionError)
    assert why in str(error)
    assert advice in str(error)
    assert error.reason
    assert "\n" not in str(error)
    assert "docs/" not in str(error)
    assert not hasattr(error, "__notes__")
    if what != "no array":
        assert error.source_type == ("torch" if what == "graph" else "numpy")
        assert error.target_type == target
    assert error.method == ("host" if what == "must copy" else error.method)


def test_more_is_said_in_the_message_of_an_error_or_below_it() -> None:
    class OwnWordsError(ValueError):
        def __str__(self) -> str:
            return "always this"

    for error in (ValueError("first"), arraybridge.CannotSplitError("first")):
        say_in(error, "second")
        assert str(error) == "first\nsecond"
    bare, own = MemoryError(), OwnWordsError("first")
    say_in(bare, "second")
    assert str(bare) == "second"
    say_in(own, "second")
    assert (own.args, own.__notes__) == (("first",), ["second"])
    with pytest.raises(MemoryError) as caught:  # it makes its words of a shape and a dtype
        np.zeros(1 << 58)
    say_in(caught.value, "second")
    assert caught.value.__notes__ == ["second"]


def test_what_a_framework_raises_is_chained() -> None:
    """A producer that fails: our error, and its own as the cause."""

    class Broken:
        def __dlpack__(self, **_: Any) -> Any:
            raise BufferError("not today")

        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

    with pytest.raises(MemoryConversionError, match="not today") as caught:
        convert_memory(Broken(), "numpy")
    assert isinstance(caught.value.__cause__, BufferError)


NEAREST = {
    "tensorflo": "tensorflow",
    "Torch": "torch",
    "jaxx": "jax",
    "pyclesperant": "pyclesperanto",
    "tf": "tensorflow",
    "np": "numpy",
    "cp": "cupy",
    "cle": "pyclesperanto",
    "jnp": "jax",
    "zzzzzz": "",
}


@pytest.mark.parametrize("name", NEAREST)
def test_an_unknown_framework_lists_the_known_and_suggests(name: str) -> None:
    with pytest.raises(UnknownFrameworkError) as caught:
        convert_memory(np.zeros(1), name)
    message = str(caught.value)
    assert repr(name) in message
    assert (
        ("did you mean" in message) == (f"did you mean {NEAREST[name]!r}" in message) == bool(NEAREST[name])
    )
    for known in ("numpy", "cupy", "torch", "jax", "tensorflow", "pyclesperanto"):
        assert known in message


@pytest.mark.parametrize("name", [None, 3, b"torch", ["torch"], np])
def test_a_framework_is_named_by_a_string(name: Any) -> None:
    with pytest.raises(TypeError):
        arraybridge.framework(name)
