"""All errors: base classes, attributes, and helpful messages."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from pathlib import Path
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
from arraybridge.advice import Advice, Cast
from arraybridge.reasons import Reason
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
def test_errors_have_their_base_classes_and_pickle(cls: Any) -> None:
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


def parts(error: MemoryConversionError) -> tuple[str, str, str]:
    return error.place, error.problem, error.advice


def test_messages_consist_of_their_parts() -> None:
    error = MemoryConversionError("It has a mask.", advice=Advice("Pass {}.", ("{x}.filled(0)",)))
    assert str(error) == "It has a mask. Pass x.filled(0)."
    error.add_path("[0]")
    error.add_path("['batch']")
    assert parts(error) == ("['batch'][0]", "It has a mask.", "Pass x.filled(0).")
    assert str(error) == "at ['batch'][0]: It has a mask. Pass x.filled(0)."
    error.add_call("f(), argument 'x'")
    error.advise_about("{x}.data")
    assert parts(error) == ("f(), argument 'x'['batch'][0]", "It has a mask.", "Pass x.data.filled(0).")
    assert str(error) == "f(), argument 'x'['batch'][0]: It has a mask. Pass x.data.filled(0)."
    error.add_call("map_blocks(f)")
    assert error.place == "map_blocks(f): f(), argument 'x'['batch'][0]"
    assert error.is_in("map_blocks(f)")
    error.problem = "It has none."
    assert str(error).endswith("[0]: It has none. Pass x.data.filled(0).")
    assert str(MemoryConversionError("text", advice="more")) == "text: more"
    empty = MemoryConversionError()
    empty.add_path(".image")
    assert str(empty) == "at .image: MemoryConversionError"


def test_names_with_braces_appear_in_the_advice() -> None:
    require("torch")
    x = np.zeros(2, [("{a}", "i4")])
    with pytest.raises(DtypeNotSupportedError) as caught:
        convert_memory({"scan": x}["scan"], "torch")
    assert caught.value.expressions == ("x['{a}']",)
    caught.value.advise_about("{x}.data")
    assert caught.value.advice == "Pass one field at a time, x.data['{a}']."


def of_plain_arrays(x: Any) -> Any:
    return x


NO_DTYPE = (
    "Cannot convert float128 to torch: torch has no dtype float128, and any other dtype could lose values."
)


@pytest.mark.skipif(np.dtype("g").name != "float128", reason="long double is float64 here")
def test_dtype_advice_fits_the_call() -> None:
    require("torch")
    x = np.zeros(2, "g")
    by_argument = arraybridge.torch(of_plain_arrays)
    by_result = arraybridge.numpy(output_type="torch")(of_plain_arrays)
    cases: list[tuple[Callable[[], Any], str, str]] = [
        (to("torch", x), "", 'Pass dtype="float64" to ask for a cast.'),
        (lambda: arraybridge.convert_tree([x], "torch"), "[0]", 'Pass dtype="float64" to ask for a cast.'),
        (
            lambda: by_argument({"a": x}),
            "of_plain_arrays(), argument 'x'['a']",
            'Pass dtype= to the decorator to ask for a cast: @torch(dtype="float64").',
        ),
        (lambda: by_result([x]), "of_plain_arrays(), result[0]", 'Cast it to "float64" in the function.'),
    ]
    for call, place, advice in cases:
        with pytest.raises(DtypeNotSupportedError) as caught:
            call()
        error = caught.value
        assert parts(error) == (place, NO_DTYPE, advice)
        assert error.cast == Cast("float64")
        twin = pickle.loads(pickle.dumps(error))
        assert (parts(twin), str(twin), twin.cast) == (parts(error), str(error), error.cast)


def test_declared_source_advice_fits_the_call() -> None:
    torch = require("torch")
    strict = arraybridge.torch(input_type="numpy", strict=True)(of_plain_arrays)
    with pytest.raises(SourceMismatchError) as converted:
        convert_memory(torch.ones(2), "numpy", "jax")
    with pytest.raises(SourceMismatchError) as called:
        strict(torch.ones(2))
    assert converted.value.advice == "Omit the source to detect it automatically."
    assert called.value.advice == "Remove strict=True to detect the framework automatically."
    assert converted.value.code == called.value.code == Reason.OTHER_SOURCE


# ---- errors as users see them ----------------------------------------------------------------------------


def to(target: str, x: Any, **options: Any) -> Callable[[], Any]:
    return lambda: convert_memory(x, target, **options)


X = np.zeros((2, 3))
DTYPE, REFUSED, DEVICE = DtypeNotSupportedError, ArrayNotSupportedError, DeviceNotFoundError
CL = "pyclesperanto"
#: Part of a heading on the troubleshooting page: a call, its error, and a part of the advice.
EXPLAINED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "NumPy arrays are always in host memory": (lambda: arraybridge.to_gpu(X), DEVICE, '(x, "cupy", 0)'),
    "an object of type list: it is not an array": (to("torch", [1, 2]), UnknownArrayError, "np.asarray(x)"),
    "pyclesperanto has no dtype float64": (to(CL, X), DTYPE, "float32"),
    "dtype object": (to("torch", np.array([None])), DTYPE, "x.astype(float)"),
    "a masked NumPy array": (to("torch", np.ma.masked_equal(X, 0)), REFUSED, "filled"),
    "jax.experimental.sparse does not have CSC": (
        lambda: to("jax", require("scipy.sparse").csc_array((2, 2)))(),
        REFUSED,
        "x.tocsr()",
    ),
    "to pyclesperanto: images have 1 to 3 axes": (
        to(CL, np.zeros((1, 1, 1, 1))),
        REFUSED,
        'x.reshape((-1, 1, 1)).astype("float32")',
    ),
    "requires grad": (
        lambda: arraybridge.to_numpy(require("torch").ones(2, requires_grad=True)),
        GradientError,
        "detach",
    ),
    "copy=False": (to("torch", X[::-1], copy=False), CopyRequiredError, "copy=None"),
    "declared as torch": (lambda: convert_memory(X, "torch", "numpy"), SourceMismatchError, ""),
    "'pytorch' is not a known framework": (to("pytorch", X), UnknownFrameworkError, "did you mean 'torch'"),
    "gpu_id=-1": (to("torch", X, gpu_id=-1), ValueError, ""),
    "'cuda0' is not a device": (to("torch", X, device="cuda0"), ValueError, "Pass 'cpu', "),
    "not both": (to("torch", X, gpu_id=0, device="cpu"), ValueError, ""),
    "is a decorator and has no attribute 'nn'": (lambda: arraybridge.torch.nn, AttributeError, ""),  # type: ignore[attr-defined]
    "no common namespace": (lambda: arraybridge.array_namespace(X, to("torch", X)()), TypeError, ""),
}
MET = EXPLAINED | {
    "<U1": (to("torch", np.array(["a"])), DTYPE, "Pass integers that identify the strings"),
    "datetime64": (to("torch", np.array(["2020"], "M8[D]")), DTYPE, 'x.astype("int64")'),
    "'a'": (to("torch", np.zeros(1, [("a", "i4")])), DTYPE, "x['a']"),
    np.dtype("g").name: (to("torch", np.zeros(1, "g")), DTYPE, "dtype="),
    "bool": (to(CL, np.zeros(1, bool)), DTYPE, "uint8"),
    "an array of shape (0,)": (to(CL, np.zeros(0, "f4")), REFUSED, "Keep empty arrays in another framework."),
    "gpu:99": (to("torch", X, gpu_id=99), DEVICE, "cpu"),
    "float31": (to("torch", X, dtype="float31"), DTYPE, "float32"),
    "dtype='complex256'": (to("torch", X, dtype="complex256"), DTYPE, "did you mean 'complex128'"),
    "dtype='complex32'": (to("torch", X, dtype="complex32"), DTYPE, "did you mean 'complex64'"),
    "dtype='int128'": (to("torch", X, dtype="int128"), DTYPE, "did you mean 'int64'"),
    "dtype='bool1'": (to("torch", X, dtype="bool1"), DTYPE, "did you mean 'bool'"),
}
PAGE = Path(__file__).parent.parent / "docs" / "troubleshooting.md"


@pytest.mark.parametrize("words", MET)
def test_messages_have_cause_and_fix_and_are_documented(words: str) -> None:
    for framework in ("torch", "pyclesperanto"):
        require(framework)
    call, cls, advice = MET[words]
    with pytest.raises(cls) as caught:
        call()
    error = caught.value
    assert type(error) is cls
    message = " ".join(f"{cls.__name__}: {error}".split())
    assert words in message
    assert advice in message
    if isinstance(error, (DTYPE, CopyRequiredError)):
        assert (error.source_type, error.target_type in ("torch", CL)) == ("numpy", True)
        assert (error.method == "host") == (cls is CopyRequiredError)
    if isinstance(error, MemoryConversionError):
        assert error.reason
        assert "\n" not in str(error)
        assert "docs/" not in str(error)
        assert not hasattr(error, "__notes__")
    if words in EXPLAINED and PAGE.is_file():
        headings = re.findall(r"^### `(\w+Error: .*)`$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
        (heading,) = [line for line in headings if words in line]
        wanted = ".*".join(re.escape(part.strip()) for part in heading.split("…"))
        assert re.match(wanted, message), f"{message!r} is not explained by {heading!r}"


NEAREST = {"tensorflo": "tensorflow", "Torch": "torch", "tf": "tensorflow", "np": "numpy", "cp": "cupy"}
NEAREST |= {"cle": "pyclesperanto", "jnp": "jax", "zzzzzz": ""}


@pytest.mark.parametrize("name", NEAREST)
def test_an_unknown_framework_lists_the_known_and_suggests(name: str) -> None:
    with pytest.raises(UnknownFrameworkError) as caught:
        convert_memory(np.zeros(1), name)
    message = str(caught.value)
    assert repr(name) in message
    suggestion = f"did you mean {NEAREST[name]!r}" if NEAREST[name] else ""
    assert suggestion in message
    assert ("did you mean" in message) == bool(suggestion)
    for known in ("numpy", "cupy", "torch", "jax", "tensorflow", "pyclesperanto"):
        assert known in message
