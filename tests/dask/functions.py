"""Functions that worker processes import, and helpers for the tests in this folder."""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import convert_memory, detect_memory_type, device_of
from arraybridge.dask import map_blocks, recoveries, to_dask
from arraybridge.testing import inject_oom
from tests import matrix_data as data
from tests.helpers import require

#: Options of clusters. Port 0, because two concurrent runs must not compete for 8787, the meaning of None.
QUIET: dict[str, Any] = {"threads_per_worker": 1, "dashboard_address": "127.0.0.1:0"}

#: float32, 13 × 10, all values distinct, and all chunks different.
IMAGE = (np.random.default_rng(7).permutation(130).astype("float32") / 4).reshape(13, 10)
CHUNKS = ((5, 5, 3), (4, 6))


# -- filters whose result depends on the whole block ----------------------------------------------------


@arraybridge.numpy
def normalize(x: Any) -> Any:
    """Normalize to mean 0 and standard deviation 1."""
    assert detect_memory_type(x) == "numpy"
    return (x - x.mean()) / x.std()


@arraybridge.torch
def torch_mean(x: Any) -> Any:
    """Return the 3 × 3 mean."""
    torch = importlib.import_module("torch")
    assert detect_memory_type(x) == "torch"
    return torch.nn.functional.avg_pool2d(x[None, None], 3, stride=1, padding=1)[0, 0]


@arraybridge.jax
def jax_stretch(x: Any) -> Any:
    """Stretch the range to 0 to 1."""
    assert detect_memory_type(x) == "jax"
    return (x - x.min()) / (x.max() - x.min())


@arraybridge.tensorflow
def tensorflow_mean(x: Any) -> Any:
    """Return the 3 × 3 mean."""
    tf = importlib.import_module("tensorflow")
    assert detect_memory_type(x) == "tensorflow"
    return tf.nn.avg_pool2d(x[None, :, :, None], 3, 1, "SAME")[0, :, :, 0]


@arraybridge.pyclesperanto
def clesperanto_gaussian(x: Any) -> Any:
    """Apply a Gaussian blur."""
    assert detect_memory_type(x) == "pyclesperanto"
    package = sys.modules.get("pyclesperanto_prototype") or importlib.import_module("pyclesperanto")
    return package.gaussian_blur(x, sigma_x=1, sigma_y=1)


FILTERS = {
    "numpy": normalize,
    "torch": torch_mean,
    "jax": jax_stretch,
    "tensorflow": tensorflow_mean,
    "pyclesperanto": clesperanto_gaussian,
}


def blockwise(fn: Any, image: np.ndarray, chunks: tuple[tuple[int, ...], ...]) -> np.ndarray:
    """Apply ``fn`` to each chunk of a 2-D image, and concatenate the results."""
    rows, columns = (np.cumsum(sizes)[:-1] for sizes in chunks)
    parts = [np.split(row, columns, axis=1) for row in np.split(image, rows)]
    return np.block([[convert_memory(fn(part.copy()), "numpy") for part in row] for row in parts])


# -- functions that run on workers ----------------------------------------------------------------------


class Model:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    @arraybridge.torch
    def scaled(self, x: Any) -> Any:
        return x * self.factor


@arraybridge.torch
def sum_of_nine(x: Any) -> Any:
    """Return the 3 × 3 sum of integers; elements outside the block count as 0."""
    padded = importlib.import_module("torch").nn.functional.pad(x, (1, 1, 1, 1))
    height, width = x.shape
    return sum(padded[i : i + height, j : j + width] for i in range(3) for j in range(3))


@arraybridge.torch
def twice(x: Any) -> Any:
    return x * 2


@arraybridge.torch
def one_row(x: Any) -> Any:
    return x[:1]


@arraybridge.torch(gpu_id=99)
def on_a_gpu_that_is_not_there(x: Any) -> Any:
    return x


@arraybridge.torch
def with_graph(x: Any) -> Any:
    return x.clone().requires_grad_() * 2


@arraybridge.torch(oom_recovery="split")
def plus_one(x: Any) -> Any:
    return x + 1


@arraybridge.pyclesperanto(gpu_id=1)
def number_of_second(x: Any) -> Any:
    """Return the number of the accelerator on which the function runs."""
    return np.full(x.shape, device_of(x).index, np.float32)


_simulation = ExitStack()


def begin_simulation(rows: int) -> dict[str, int]:
    """Limit this process to this many rows, and return the previous recoveries."""
    _simulation.enter_context(inject_oom("torch", above_rows=rows))
    return recoveries()


def end_simulation() -> dict[str, int]:
    """Return the recoveries of this process."""
    _simulation.close()
    return recoveries()


def made(framework: str, place: str = "itself") -> Any:
    """Return a large array of a framework, or a small one, possibly inside another object."""
    x = convert_memory(np.arange(10 if place == "small" else 1 << 18, dtype=np.float64), framework)
    return {"in a dict": {"x": [x]}, "in an object": SimpleNamespace(x=[x])}.get(place, x)


def used(value: Any) -> tuple[np.ndarray, bool, bool]:
    """Return the values of an object from `made`, and whether they are in shared memory and writable."""
    value = value["x"][0] if isinstance(value, dict) else value
    values = convert_memory(value.x[0] if isinstance(value, SimpleNamespace) else value, "numpy")
    is_shared = False
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        start, _, end = line.split()[0].partition("-")
        if int(start, 16) <= values.ctypes.data < int(end, 16):
            is_shared = "memfd:arraybridge" in line
    return values.copy(), is_shared, values.flags.writeable


def environment() -> dict[str, str]:
    return dict(os.environ)


def loaded(*names: str) -> list[str]:
    """Return which of these modules the process has imported."""
    return [name for name in names if name in sys.modules]


def only_gpu() -> int | None:
    return importlib.import_module("arraybridge.conversion.device_resolution").only_gpu


# -- creating and checking blocks -------------------------------------------------------------------------


def numbers() -> Any:
    """Return the float64 array [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]] in blocks of 2 × 2."""
    return to_dask(np.arange(12.0).reshape(3, 4), chunks=(2, 2))


def computed(array: Any, scheduler: Any = "synchronous") -> np.ndarray:
    """Compute a Dask array, and check that the result is a NumPy array of the declared dtype and shape."""
    result = array.compute(scheduler=scheduler)
    assert isinstance(result, np.ndarray | np.generic)
    assert result.dtype == array.dtype
    assert result.shape == array.shape
    return result


def check_equal(result: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(result, expected, strict=True)


def check_filter(name: str, scheduler: Any) -> None:
    """Check the filter of a framework on each chunk, and a second filter after it."""
    image = to_dask(IMAGE, CHUNKS)
    filtered = blockwise(FILTERS[name], IMAGE, CHUNKS)
    assert not np.array_equal(filtered, IMAGE)
    check_equal(computed(map_blocks(FILTERS[name], image), scheduler), filtered)
    both = map_blocks(normalize, map_blocks(FILTERS[name], image))
    check_equal(computed(both, scheduler), blockwise(normalize, filtered, CHUNKS))


def built(framework: str, layout: str, dtype: str) -> data.Source:
    """Return a source made without arraybridge, of random bits that include NaN payloads, subnormals and
    extremes.
    """
    require(framework)
    if dtype in data.EXTENSION_DTYPES:
        pytest.importorskip("ml_dtypes")
    return data.build(framework, layout, dtype)


def bits(x: Any) -> bytes:
    """Return the values as bytes. Wait first, because unpickled JAX arrays may not be complete yet."""
    if hasattr(x, "block_until_ready"):
        x.block_until_ready()
    return data.bits(x)
