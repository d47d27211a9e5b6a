"""`aligned`: NumPy memory that every framework can share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from arraybridge import aligned, explain, to_numpy
from arraybridge.host import buffers
from tests.helpers import require


@pytest.mark.parametrize("dtype", ["float32", np.dtype("i2"), "bool", "complex128", "bfloat16", int])
def test_memory_is_aligned_and_shared(dtype: Any) -> None:
    for shape in ((), (0,), (3,), (2, 0, 3), (5, 7), (1 << 10, 1 << 10), 9, np.int64(4), [2, 3]):
        x = aligned(shape, dtype)
        assert (type(x), x.shape) == (np.ndarray, np.empty(shape).shape)
        assert x.flags.c_contiguous
        assert x.flags.writeable
        if x.size:
            assert x.__array_interface__["data"][0] % 64 == 0
            x[...] = 1
            for target in ("torch", "jax", "tensorflow"):
                require(target)
                assert explain(x, target, copy=False).shares_memory
    assert aligned(3).dtype == np.float64


@pytest.mark.parametrize("framework", ["torch", "jax", "tensorflow"])
def test_the_dtype_of_a_framework(framework: str) -> None:
    module = require(framework)
    module = module.numpy if framework == "jax" else module
    for name in ("float32", "int16", "bool", "bfloat16", "float8_e5m2"):
        if hasattr(module, name):
            assert aligned((2, 3), getattr(module, name)).dtype.name == name


@pytest.mark.parametrize(
    ("shape", "dtype", "error", "words"),
    [
        *((2, dtype, TypeError, "not understood") for dtype in ("no dtype", "x.y", 3.5)),
        *((shape, "f4", TypeError, "is not a valid shape") for shape in (2.5, "ab", None, (2, None))),
        ((-1,), "f4", ValueError, "negative"),
        (2, object, ValueError, "object"),
    ],
)
def test_invalid_arguments_are_named(shape: Any, dtype: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        aligned(shape, dtype)


def test_dtypes_that_numpy_lacks_raise_type_error() -> None:
    with pytest.raises(TypeError, match="qint8"):
        aligned(2, require("torch").qint8)


def test_a_large_copy_for_numpy_can_be_shared_by_every_framework() -> None:
    own = [np.ones(1 << 16, np.float32) for _ in range(8)]
    copies = [to_numpy(x, copy=True) for x in own]
    assert [x.ctypes.data % 64 for x in copies] == [0] * 8


def test_the_address_of_any_array_is_that_of_its_first_element() -> None:
    memory = np.arange(24.0).reshape(4, 6)
    locked = memory.view()
    locked.flags.writeable = False
    layouts = [memory, memory.T, memory[::-1], memory[:, 1::2], memory[4:], memory[:, :0], locked, locked.T]
    others = [np.array(1.0), np.zeros(0), np.zeros(3, ">i2"), np.zeros(3, "M8[s]"), np.array([None, "x"])]
    for x in [*layouts, *others, np.broadcast_to(1.0, (3, 4))]:
        assert buffers.address(x) == x.__array_interface__["data"][0]


@pytest.mark.parametrize("dtype", ["uint8", "float32", "int64", "complex128"])
def test_large_copies_of_short_and_long_axes_are_exact(dtype: str) -> None:
    require("torch")
    for shape in ((300, 300, 2), (2, 300, 300), (40, 50, 60), (90_000, 3), (3, 90_000), (300, 500)):
        x = (np.arange(np.prod(shape)) % 251).astype(dtype).reshape(shape)
        for view in (x.T, x[..., ::-1], np.moveaxis(x, -1, 0), np.moveaxis(x, 0, -1), x[..., :-1]):
            copied = buffers.copy_aligned(view)
            assert copied.flags.c_contiguous
            assert np.array_equal(copied, view)
