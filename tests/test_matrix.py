"""Every ordered pair of host frameworks, dtype and layout, against the hand-written table in matrix_data.

Test IDs have the form `torch-jax-float32`. Failures name the layout and the value of `copy=`.
"""

from __future__ import annotations

import gc
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
# Expected failures of a case; all others are errors in the tests.
WRONG = (AssertionError, ValueError, TypeError, RuntimeError, BufferError, AttributeError)
METHODS = ("same", "view", "dlpack", "device", "host")

# Allowed outcomes of copy=None and copy=False for each entry of the table: True shares, False copies, None
# raises.
BY_DEFAULT_AND_NEVER_COPYING: dict[str, tuple[set[Any], set[Any]]] = {
    "same": ({True}, {True}),
    "share": ({True}, {True}),
    "copy": ({False}, {None}),
    "copy*": ({False}, {True}),
    "copy?": ({False}, {True, None}),
    "may": ({True, False}, {True, None}),
    "empty": ({True, False}, {True, None}),
}


def build_or_none(source: str, layout: str, dtype: str) -> data.Source | None:
    return None if data.inexpressible(source, layout, dtype) else data.build(source, layout, dtype)


def check_refused(made: data.Source, names: tuple[str, ...], outcome: str, **options: Any) -> None:
    """Check that the conversion and its explanation both raise the typed error."""
    wanted = DtypeNotSupportedError if outcome == "refuse-dtype" else MemoryConversionError
    for call in (arraybridge.convert_memory, arraybridge.explain):
        with pytest.raises(wanted) as caught:
            call(made.array, *names, **options)
        assert len(str(caught.value)) > 20, f"{call.__name__}: the message is too short: {caught.value}"


def check_value(result: Any, made: data.Source, target: str, dtype: str) -> None:
    """Check framework, dtype, shape, device and every bit."""
    assert data.framework_of(result) == target, f"the result is a {type(result)}"
    assert data.dtype_name(result) == dtype, f"dtype {data.dtype_name(result)}"
    assert tuple(result.shape) == made.shape, f"shape {tuple(result.shape)}, not {made.shape}"
    assert data.is_in_its_place(result), "the result is on another device"
    assert data.bits(result) == made.values, "the values differ"


def is_shared(result: Any, made: data.Source, same: bool) -> bool:
    """Return whether the result shares the source's memory, after checks that hold in any case."""
    assert (result is made.array) == same, "the same framework and device must return the same object"
    address = data.address(result)
    shared = same or (address is not None and address == data.address(made.array))
    if shared and not same and data.framework_of(made.array) in ("jax", "tensorflow"):
        assert not (isinstance(result, np.ndarray) and result.flags.writeable), "a view must be read-only"
    return shared


def check_explanation(
    route: Any, made: data.Source, pair: tuple[str, str], result: Any, shared: bool
) -> None:
    """Check that the previous explain() is correct for the result."""
    size = len(made.values)
    assert (str(route.source), str(route.target)) == pair, f"{route!r}"
    assert route.method in METHODS, route.method
    assert (route.method == "same") == (result is made.array), f"method {route.method!r}"
    assert route.nbytes == size, f"nbytes {route.nbytes}, not {size}"
    if size:
        assert route.shares_memory == shared, f"shares_memory={route.shares_memory}, but shared: {shared}"
        assert (route.copies == 0) == shared, f"copies={route.copies}, but shared: {shared}"
    if pair[1] != "pyclesperanto":
        assert str(route.device) == "cpu", f"device {route.device!r}"


def check_case(source: str, target: str, layout: str, dtype: str, copy: bool | None) -> None:
    """Check one cell of the matrix; an AssertionError describes the mistake."""
    made = build_or_none(source, layout, dtype)
    if made is None:
        return
    exempt = layout in ("negative", "zero-size") or (source, layout) == ("tensorflow", "0-d")
    if source != "pyclesperanto" and not exempt:
        offset = data.byte_offset(layout, data.numpy_dtype(dtype).itemsize)
        assert data.address(made.array) % 64 == offset, "the source does not have the alignment of the table"
    outcome = data.expected(source, target, layout, dtype)
    options = {} if copy is None else {"copy": copy}  # the most common call, which takes the shortest path
    if outcome.startswith("refuse"):
        check_refused(made, (target,), outcome, copy=copy)
        check_refused(made, (source, target), outcome, **options, dtype=dtype, grad="detach")
        return
    by_default, never_copying = BY_DEFAULT_AND_NEVER_COPYING[outcome]
    allowed = {None: by_default, True: {False}, False: never_copying}[copy]
    try:
        predicted = arraybridge.explain(made.array, target, copy=copy)
    except CopyRequiredError:
        assert None in allowed, "CopyRequiredError was raised, although the memory can be shared"
        for more in ({}, {"dtype": dtype, "grad": "detach"}):
            with pytest.raises(CopyRequiredError):
                arraybridge.convert_memory(made.array, target, copy=copy, **more)
        return
    # A trace uses another code path, as do options without an effect, and a call that follows another.
    place = {"dtype": dtype, "device": predicted.device, "grad": "detach"}
    results = [arraybridge.convert_memory(made.array, target, **options)]
    with arraybridge.trace() as log:
        results.append(arraybridge.convert_memory(made.array, target, copy=copy))
    results.append(arraybridge.convert_memory(made.array, source, target, **options))
    results.append(arraybridge.convert_memory(made.array, target, **options, **place))
    results.append(arraybridge.convert_memory(made.array, target, **options))

    size = len(made.values)
    same = outcome == "same" and copy is not True
    sharing = [is_shared(result, made, same) for result in results]
    shared = sharing[0]
    for result in results:
        check_value(result, made, target, dtype)
        if target in ("jax", "tensorflow") and outcome != "same" and size > data.numpy_dtype(dtype).itemsize:
            assert data.address(result) % 64 == 0, "the result must be aligned for the framework's kernels"
    if size:
        assert shared in allowed, f"{'shared' if shared else 'copied'} memory"
        assert len(set(sharing)) == 1, f"plain, traced, declared, with all options, repeated: {sharing}"
    if made.flip is not None and size and not same:
        made.flip()
        for result in results:
            if shared:
                assert data.bits(result) == made.flipped, "shared memory must reflect changes to the source"
            else:
                assert data.bits(result) == made.values, "a copy must not reflect changes to the source"
    check_explanation(predicted, made, (source, target), results[0], shared)
    assert len(log.records) == 1, f"{len(log.records)} records of one conversion"
    for field in FIELDS:
        before, after = getattr(predicted, field), getattr(log.records[0], field)
        assert before == after, f"explain() predicted {field}={before!r}, trace() recorded {after!r}"

    left = made.flipped if made.flip is not None and shared and not same else made.values
    del made
    gc.collect(0)
    fillers = [np.full(24 + n, 7, np.float32) for n in range(16)]  # would reuse a freed block
    assert [data.bits(result) for result in results] == [left] * len(results), (
        "changed after deleting the source"
    )
    del fillers


def _line(*case: object) -> str:
    *names, copy, error = case
    what = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
    return f"{' '.join(map(str, names))} copy={copy}: {what}{str(error).partition(chr(10))[0]}"


def failures_of(source: str, target: str, dtype: str) -> list[str]:
    """Return one line for each wrong cell of this pair and dtype."""
    failures = []
    for layout in data.LAYOUTS:
        for copy in (None, True, False):
            if copy and source == target == "tensorflow" and layout in ("offset", "unaligned"):
                continue  # a mistake here would crash the process: tests/crashes/misaligned_tensorflow.py
            try:
                check_case(source, target, layout, dtype, copy)
            except (*WRONG, MemoryConversionError, pytest.fail.Exception) as error:
                failures.append(_line(source, target, dtype, layout, copy, error))
    return failures


@pytest.mark.parametrize("dtype", data.DTYPES)
@pairs
@sources
def test_conversion(source: str, target: str, dtype: str) -> None:
    require(source)
    require(target)
    if data.inexpressible(source, "aligned" if source != "pyclesperanto" else "C", dtype):
        return  # a source that cannot exist
    failures = failures_of(source, target, dtype)
    assert not failures, "\n".join([f"{len(failures)} wrong", *failures])


# ---- a copy is complete when the call returns ------------------------------------------------------------

COUNT = 16 * 2**20 // 4


@pytest.mark.parametrize(
    ("layout", "copy"),
    [("aligned", True), ("offset", True), ("offset", None), ("negative", None), ("big-endian", None)],
)
@pairs
@pytest.mark.parametrize("source", ["numpy", "torch"])  # those whose arrays are writable
def test_a_copy_is_complete_when_the_call_returns(
    source: str, target: str, layout: str, copy: bool | None
) -> None:
    """Overwrite 16 MiB immediately after the copy."""
    require(target)
    if data.inexpressible(source, layout, "float32") or (source == target and copy is None):
        return  # no such array exists, or it is the same object
    memory = data.aligned_bytes(4 * COUNT, 4 if layout == "offset" else 0).view(np.float32)
    memory[...] = values = np.arange(COUNT, dtype=np.float32)
    array: Any = memory[::-1] if layout == "negative" else memory
    if layout == "big-endian":
        memory.byteswap(inplace=True)
        array = memory.view(">f4")
    if source == "torch":
        array = require("torch").from_numpy(array)
    copies = copy is True or data.expected(source, target, layout, "float32") == "copy"
    result = arraybridge.convert_memory(array, target, copy=copy)
    memory[...] = 0
    expected = values[::-1] if layout == "negative" else values
    wrong = np.frombuffer(data.bits(result), np.float32) != (expected if copies else 0)
    assert not wrong.any(), f"{wrong.sum()} of {COUNT} elements changed with the source"


# ---- explicit casts --------------------------------------------------------------------------------------

CAST_FROM = {
    "float64": [0.1, -0.0, 16777217.0, 1e30, 1e-42, float("inf")],
    "int32": [0, -1, 16777217, 2147483647, -2147483648, 7],
    "uint8": [0, 1, 127, 128, 254, 255],
    "float32": [0.1, -0.0, 16777216.0, 1e30, -1.5, float("inf")],
}


def _native_cast(target: str, values: np.ndarray[Any, Any], dtype: str) -> bytes:
    """Cast by the target framework's own call."""
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


@pairs
@sources
def test_dtype_casts_as_the_target_casts(source: str, target: str) -> None:
    require(source)
    require(target)
    for name, numbers in CAST_FROM.items():
        if source == "pyclesperanto" and name not in data.PYCLESPERANTO_DTYPES:
            continue
        values = np.array(numbers, name)
        array = arraybridge.convert_memory(values, source, copy=True)
        result = arraybridge.convert_memory(array, target, dtype="float32")
        assert data.framework_of(result) == target, name
        assert data.dtype_name(result) == "float32", name
        assert data.bits(result) == _native_cast(target, values, "float32"), name
        if source == target and name == "float32":
            assert result is array, "a cast to the same dtype must return the same object"
