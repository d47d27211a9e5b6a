"""`aligned`: NumPy memory that every framework can share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import aligned, explain
from tests.helpers import require


@pytest.mark.parametrize(
    "shape", [(), (0,), (3,), (2, 0, 3), (5, 7), (1 << 12, 1 << 10), 9, np.int64(4), [2, 3]], ids=str
)
@pytest.mark.parametrize(
    "dtype", ["float32", np.float64, np.dtype("i2"), "bool", "complex128", "bfloat16", int]
)
def test_it_is_aligned_and_shared(shape: Any, dtype: Any) -> None:
    x = aligned(shape, dtype)
    wanted = tuple(shape) if isinstance(shape, (tuple, list)) else (int(shape),)
    assert (x.shape, type(x)) == (wanted, np.ndarray)
    assert x.flags.c_contiguous
    assert x.flags.writeable
    assert x.__array_interface__["data"][0] % 64 == 0 or not x.size
    if x.size:
        x[...] = 1
        for target in ("torch", "jax", "tensorflow"):
            require(target)
            assert explain(x, target, copy=False).shares_memory


def test_the_default_is_numpys() -> None:
    assert aligned(3).dtype == np.empty(3).dtype


@pytest.mark.parametrize(
    ("framework", "name"),
    [
        *(("torch", name) for name in ("float32", "int16", "bool", "bfloat16", "float8_e5m2")),
        *(("tensorflow", name) for name in ("float32", "bfloat16")),
        *(("jax", name) for name in ("float32", "bfloat16")),
    ],
)
def test_the_dtype_of_a_framework(framework: str, name: str) -> None:
    module = require(framework)
    module = module.numpy if framework == "jax" else module
    assert aligned((2, 3), getattr(module, name)).dtype.name == name


@pytest.mark.parametrize("dtype", ["no dtype", "x.float32", 3.5, "qint8"])
def test_what_is_no_dtype_is_named(dtype: Any) -> None:
    dtype = require("torch").qint8 if dtype == "qint8" else dtype
    with pytest.raises(TypeError, match=r"dtype=.* is no dtype .*; pass .*'float32'"):
        aligned(2, dtype)


@pytest.mark.parametrize("shape", [2.5, "ab", None, (2, None)])
def test_what_is_no_shape_is_named(shape: Any) -> None:
    with pytest.raises(TypeError, match=r"shape=.* whole number"):
        aligned(shape)


@pytest.mark.parametrize(
    ("shape", "dtype", "error"),
    [
        ((-1,), "f4", ValueError),
        (2, object, ValueError),
        (2.5, "f4", TypeError),
        ("ab", "f4", TypeError),
        (2, "no dtype", TypeError),
    ],
)
def test_what_makes_no_sense(shape: Any, dtype: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        arraybridge.aligned(shape, dtype)
