"""Every ordered pair of host frameworks, dtype and layout, against the hand-written table in matrix_data.

An id reads `torch-jax-float32`; a failure names the layout and the `copy=` it was seen with.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import CopyRequiredError, DtypeNotSupportedError, MemoryConversionError
from tests import matrix_data as data
from tests.helpers import require

pairs = pytest.mark.parametrize("target", data.FRAMEWORKS)
sources = pytest.mark.parametrize("source", data.FRAMEWORKS)

FIELDS = ("source", "target", "method", "device", "shares_memory", "copies", "nbytes", "reason")
METHODS = ("same", "view", "dlpack", "device", "host")

# What copy=None and copy=False may lead to, by the word of the table: True shares, False copies, None raises.
BY_DEFAULT = {
    "same": {True},
    "share": {True},
    "copy": {False},
    "copy*": {False},
    "copy?": {False},
    "may": {True, False},
    "empty": {True, False},
}
NEVER_COPYING = {
    "same": {True},
    "share": {True},
    "copy": {None},
    "copy*": {True},
    "copy?": {True, None},
    "may": {True, None},
    "empty": {True, None},
}


def build_or_none(source: str, layout: str, dtype: str) -> data.Source | None:
    return None if data.inexpressible(source, layout, dtype) else data.build(source, layout, dtype)


def check_refused(made: data.Source, target: str, outcome: str, copy: bool | None) -> None:
    """The conversion and its explanation both end in the typed error."""
    wanted = DtypeNotSupportedError if outcome == "refuse-dtype" else MemoryConversionError
    for call in (arraybridge.convert_memory, arraybridge.explain):
        try:
            result = call(made.array, target, copy=copy)
        except wanted as error:
            message = str(error)
        else:
            raise AssertionError(f"{call.__name__} gave {result!r} where {wanted.__name__} is due")
        assert len(message) > 20, f"{call.__name__}: the message says too little: {message}"


def check_value(result: Any, made: data.Source, target: str, dtype: str) -> None:
    """Framework, dtype, shape, device and every bit."""
    assert data.framework_of(result) == target, f"arrived as {type(result)}"
    assert data.dtype_name(result) == dtype, f"dtype {data.dtype_name(result)}"
    assert tuple(result.shape) == made.shape, f"shape {tuple(result.shape)}, not {made.shape}"
    assert data.device_word(result) == data.expected_device(target), f"device {data.device_word(result)}"
    assert data.bits(result) == made.values, "the bits differ"


def _plainly(array: Any, target: str, copy: bool | None) -> tuple[Any, Any]:
    if copy is None:  # as most calls are written; the shortest path is theirs
        return arraybridge.convert_memory(array, target), None
    return arraybridge.convert_memory(array, target, copy=copy), None


def _traced(array: Any, target: str, copy: bool | None) -> tuple[Any, Any]:
    with arraybridge.trace() as log:
        return arraybridge.convert_memory(array, target, copy=copy), log


def call_names(calls: Iterable[Callable[..., Any]]) -> str:
    return ", ".join(call.__name__.strip("_") for call in calls)


def check_memory(
    result: Any, made: data.Source, pair: tuple[str, str], outcome: str, copy: bool | None
) -> bool:
    """Whether the result lies in the source's memory; what must hold of it in any case is asserted."""
    if outcome == "same" and copy is not True:
        assert result is made.array, "the same framework and device must give the very object"
        return True
    assert result is not made.array
    address = data.address(result)
    shared = address is not None and address == data.address(made.array)
    if shared and pair in (("jax", "numpy"), ("tensorflow", "numpy")):
        assert not result.flags.writeable, "a view of an immutable array must be read-only"
    return shared


def check_case(source: str, target: str, layout: str, dtype: str, copy: bool | None) -> None:
    """One cell of the matrix; an AssertionError says what is wrong with it."""
    made = build_or_none(source, layout, dtype)
    if made is None:
        return
    outcome = data.expected(source, target, layout, dtype)
    if outcome.startswith("refuse"):
        check_refused(made, target, outcome, copy)
        return
    allowed = {None: BY_DEFAULT[outcome], True: {False}, False: NEVER_COPYING[outcome]}[copy]

    try:
        foretold = arraybridge.explain(made.array, target, copy=copy)
    except CopyRequiredError:
        foretold = None  # explain() may refuse exactly what convert_memory() refuses
    calls = (
        _plainly,
        _traced,
        _plainly,
    )  # a trace takes a path of its own, and so may a call that came before
    log: Any = None
    results, refusals = [], []
    for call in calls:
        try:
            result, told = call(made.array, target, copy)
        except CopyRequiredError as error:
            refusals.append(str(error))
        else:
            results.append(result)
            log = told if told is not None else log
    assert not (results and refusals), f"{call_names(calls)} disagree: {len(refusals)} of them refused"
    if refusals:
        assert None in allowed, f"refused although the memory can be shared: {refusals[0]}"
        assert foretold is None, f"explain() promised {foretold!r}, then convert_memory() refused"
        return
    assert foretold is not None, "explain() raised, then convert_memory() went through"
    size = len(made.values)
    shared = [check_memory(result, made, (source, target), outcome, copy) for result in results]
    for result, one in zip(results, shared, strict=True):
        check_value(result, made, target, dtype)
        if size:
            assert one in allowed, f"{'shared' if one else 'copied'} memory"
            assert one == shared[0], f"{call_names(calls)} disagree: shared {shared}"
        if target in ("jax", "tensorflow") and outcome != "same" and size > data.numpy_dtype(dtype).itemsize:
            assert data.address(result) % 64 == 0, "memory that the framework's kernels abort on"
    if made.flip is not None and size and result is not made.array:
        made.flip()
        for result, one in zip(results, shared, strict=True):
            now = data.bits(result)
            if one:
                assert now == made.flipped, "same address, but a change of the source does not show"
            else:
                assert now == made.values, "a change of the source shows through a copy"
    result, one = results[0], shared[0]

    # What was told of it: before by explain(), after by trace().
    record = log.records[-1]
    assert len(log.records) == 1, f"{len(log.records)} records of one conversion"
    for field in FIELDS:
        before, after = getattr(foretold, field), getattr(record, field)
        assert before == after, f"explain() foretold {field}={before!r}, trace() recorded {after!r}"
    assert (str(foretold.source), str(foretold.target)) == (source, target), f"{foretold!r}"
    assert foretold.method in METHODS, foretold.method
    assert (foretold.method == "same") == (result is made.array), f"method {foretold.method!r}"
    assert foretold.nbytes == size, f"nbytes {foretold.nbytes}, not {size}"
    if size:
        assert foretold.shares_memory == one, f"shares_memory={foretold.shares_memory}, really {one}"
        assert (foretold.copies == 0) == one, f"copies={foretold.copies}, really shared: {one}"
    if target != "pyclesperanto":
        assert str(foretold.device) == "cpu", f"device {foretold.device!r}"


def _line(*case: object) -> str:
    *names, copy, error = case
    what = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
    return f"{' '.join(map(str, names))} copy={copy}: {what}{str(error).partition(chr(10))[0]}"


def failures_of(source: str, target: str, dtype: str) -> list[str]:
    """One line for each wrong cell of this pair and dtype."""
    failures = []
    for layout in data.LAYOUTS:
        for copy in (None, True, False):
            if copy and source == target == "tensorflow" and layout in ("offset", "unaligned"):
                continue  # a wrong step here ends the process: tests/deadly/misaligned_tensorflow.py
            try:
                check_case(source, target, layout, dtype, copy)
            except AssertionError as error:
                failures.append(_line(source, target, dtype, layout, copy, error))
            except (ValueError, TypeError, RuntimeError, BufferError, AttributeError) as error:
                failures.append(_line(source, target, dtype, layout, copy, error))
            except MemoryConversionError as error:
                failures.append(_line(source, target, dtype, layout, copy, error))
    return failures


@pytest.mark.parametrize("dtype", data.DTYPES)
@pairs
@sources
def test_conversion(source: str, target: str, dtype: str) -> None:
    require(source)
    require(target)
    if data.inexpressible(source, "aligned" if source != "pyclesperanto" else "C", dtype):
        # Not a hole in the matrix: a source that cannot exist. Prove that it cannot.
        values = np.ones((2, 2), data.numpy_dtype(dtype))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of NumPy, about the imaginary part that is dropped there
            try:
                made = data.dtype_name(data.cle_module().push(values))
            except (TypeError, KeyError) as error:
                made = type(error).__name__
        assert made != dtype
        return
    failures = failures_of(source, target, dtype)
    assert not failures, "\n".join([f"{len(failures)} wrong", *failures])


@pytest.mark.parametrize("framework", data.FRAMEWORKS)
def test_every_layout_has_an_outcome_or_a_reason(framework: str) -> None:
    for layout in data.LAYOUTS:
        has_row = layout in data._TABLE[framework]
        assert has_row != (layout in data.INEXPRESSIBLE[framework]), layout
    assert len(data.LAYOUTS) >= 14
    assert len(data.DTYPES) == 17


@pytest.mark.parametrize("framework", data.FRAMEWORKS)
def test_the_probes_tell_the_truth(framework: str) -> None:
    """The builders build what their names say, by the raw probes alone."""
    require(framework)
    for layout in data.LAYOUTS:
        for dtype in data.DTYPES:
            made = build_or_none(framework, layout, dtype)
            if made is None:
                continue
            case = f"{layout} {dtype}"
            assert data.framework_of(made.array) == framework, case
            assert data.bits(made.array) == made.values, case
            assert data.dtype_name(made.array) == dtype, case
            assert tuple(made.array.shape) == made.shape, case
            assert data.device_word(made.array) == data.expected_device(framework), case
            exempt = layout in ("negative", "zero-size") or (framework, layout) == ("tensorflow", "0-d")
            if framework != "pyclesperanto" and not exempt:
                offset = data.byte_offset(layout, data.numpy_dtype(dtype).itemsize)
                assert data.address(made.array) % 64 == offset, case
            if made.flip is not None:
                made.flip()
                assert data.bits(made.array) == made.flipped, case


# ---- the matrix can fail ---------------------------------------------------------------------------------


def test_the_matrix_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four wrong converters, each caught: a needless copy, a forbidden alias, a lost bit, a lost shape."""
    require("torch")
    right = arraybridge.convert_memory
    assert failures_of("numpy", "torch", "float32") == []

    def caught(wrong: Callable[..., Any], complaint: str) -> None:
        monkeypatch.setattr(arraybridge, "convert_memory", wrong)
        failures = failures_of("numpy", "torch", "float32")
        assert any(complaint in line for line in failures), failures
        monkeypatch.setattr(arraybridge, "convert_memory", right)

    def copies(x: Any, target: str, copy: bool | None = None) -> Any:
        return right(x, target, copy=None if copy is False else True)

    def aliases(x: Any, target: str, copy: bool | None = None) -> Any:
        return right(x, target, copy=None if copy is True else copy)

    def negates(x: Any, target: str, copy: bool | None = None) -> Any:
        return -right(x, target, copy=copy)

    def flattens(x: Any, target: str, copy: bool | None = None) -> Any:
        return right(x, target, copy=copy).reshape(-1)

    caught(copies, "copied memory")
    caught(aliases, "shared memory")
    caught(negates, "bits differ")
    caught(flattens, "shape")


# ---- a copy is complete when the call returns ------------------------------------------------------------

SIXTEEN_MIB = 16 * 2**20 // 4


def _large(source: str, layout: str) -> tuple[Any, Callable[[], None]]:
    """A 16 MiB float32 source, and a call that overwrites it with zeros."""
    memory = data.aligned_bytes(4 * SIXTEEN_MIB, 4 if layout == "offset" else 0).view(np.float32)
    memory[...] = np.arange(SIXTEEN_MIB, dtype=np.float32)

    def overwrite() -> None:
        memory[...] = 0

    array: Any = memory[::-1] if layout == "negative" else memory
    if layout == "big-endian":
        memory.byteswap(inplace=True)
        array = memory.view(">f4")
    if source == "torch":
        import torch

        array = torch.from_numpy(array)
    return array, overwrite


@pytest.mark.parametrize(
    ("layout", "copy"),
    [("aligned", True), ("offset", True), ("offset", None), ("negative", None), ("big-endian", None)],
)
@pairs
@pytest.mark.parametrize("source", ["numpy", "torch"])  # those whose arrays can be written to
def test_a_copy_is_complete_when_the_call_returns(
    source: str, target: str, layout: str, copy: bool | None
) -> None:
    require(source)
    require(target)
    if source == "torch" and layout in ("negative", "big-endian"):
        return  # torch has no such layout: data.INEXPRESSIBLE
    if source == target and copy is None:
        return  # the very object: nothing is copied
    array, overwrite = _large(source, layout)
    copies = copy is True or data.expected(source, target, layout, "float32") == "copy"
    result = arraybridge.convert_memory(array, target, copy=copy)
    overwrite()
    got = np.frombuffer(data.bits(result), np.float32)
    wanted = np.arange(SIXTEEN_MIB, dtype=np.float32) if copies else np.zeros(SIXTEEN_MIB, np.float32)
    if layout == "negative":
        wanted = wanted[::-1]
    wrong = int(np.count_nonzero(got != wanted))
    assert wrong == 0, f"{wrong} of {SIXTEEN_MIB} elements changed with the source"


# ---- memory outlives the source --------------------------------------------------------------------------


@pairs
@sources
def test_memory_outlives_the_source(source: str, target: str) -> None:
    require(source)
    require(target)
    failures = []
    for layout in data.LAYOUTS:
        made = build_or_none(source, layout, "float32")
        if made is None or data.expected(source, target, layout, "float32").startswith("refuse"):
            continue
        values = made.values
        result = arraybridge.convert_memory(made.array, target)
        del made
        gc.collect(0)
        litter = [np.full(24 + n, 7, np.float32) for n in range(64)]  # what a freed block would be given to
        if data.bits(result) != values:
            failures.append(layout)
        del litter
    gc.collect()
    assert not failures, failures


# ---- a cast only when asked, as the target framework casts -----------------------------------------------

CAST_FROM = {
    "float64": [0.1, -0.0, 16777217.0, 1e30, 1e-42, float("inf")],
    "int32": [0, -1, 16777217, 2147483647, -2147483648, 7],
    "uint8": [0, 1, 127, 128, 254, 255],
    "float32": [0.1, -0.0, 16777216.0, 1e30, -1.5, float("inf")],
}


def _native_cast(target: str, values: np.ndarray[Any, Any], dtype: str) -> bytes:
    """The cast by the target framework's own call."""
    match target:
        case "numpy":
            return values.astype(dtype).tobytes()
        case "torch":
            import torch

            return torch.from_numpy(values).to(getattr(torch, dtype)).numpy().tobytes()
        case "jax":
            import jax
            import jax.numpy as jnp

            with data.x64(jax):
                return np.asarray(jnp.array(values).astype(dtype)).tobytes()
        case "tensorflow":
            import tensorflow as tf

            return tf.cast(tf.constant(values), dtype).numpy().tobytes()
        case _:
            return data.cle_module().pull(data.cle_push(values.astype(dtype))).tobytes()


def _native_source(source: str, values: np.ndarray[Any, Any]) -> Any:
    match source:
        case "numpy":
            return values.copy()
        case "torch":
            import torch

            return torch.from_numpy(values.copy())
        case "jax":
            import jax
            import jax.numpy as jnp

            with data.x64(jax):
                return jax.block_until_ready(jnp.array(values))
        case "tensorflow":
            import tensorflow as tf

            return tf.constant(values)
        case _:
            return data.cle_push(values)


@pairs
@sources
def test_dtype_casts_as_the_target_casts(source: str, target: str) -> None:
    require(source)
    require(target)
    for name, numbers in CAST_FROM.items():
        if source == "pyclesperanto" and name not in data.PYCLESPERANTO_DTYPES:
            continue
        values = np.array(numbers, name)
        array = _native_source(source, values)
        result = arraybridge.convert_memory(array, target, dtype="float32")
        assert data.framework_of(result) == target, name
        assert data.dtype_name(result) == "float32", name
        assert data.bits(result) == _native_cast(target, values, "float32"), name
        if source == target and name == "float32":
            assert result is array, "a cast to the dtype it has is no cast"
