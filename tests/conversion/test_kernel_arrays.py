"""Arrays of libraries for kernels of one's own: pyopencl's, and numba.cuda's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arraybridge
from tests.helpers import require

SCRIPT = Path(__file__).parent / "scripts" / "numba_simulator.py"


@pytest.fixture
def on_opencl() -> Any:
    cl = pytest.importorskip("pyopencl")
    require("pyclesperanto")  # finds a device
    queue = cl.CommandQueue(cl.create_some_context(interactive=False))
    from pyopencl import array

    return lambda x: array.to_device(queue, x)


@pytest.mark.parametrize("dtype", ["float32", "int16", "uint8", "float64"])
@pytest.mark.parametrize("target", ["numpy", "torch", "jax"])
def test_arrays_of_pyopencl_are_sources(target: str, dtype: str, on_opencl: Any) -> None:
    require(target)
    expected = np.arange(6).reshape(2, 3).astype(dtype)
    there = on_opencl(expected)
    result = arraybridge.convert_memory(there, target)
    assert arraybridge.detect_memory_type(result) == target
    np.testing.assert_array_equal(arraybridge.to_numpy(result), expected, strict=True)
    there.fill(0)
    np.testing.assert_array_equal(arraybridge.to_numpy(result), expected)
    assert not arraybridge.explain(there, target).shares_memory
    with pytest.raises(arraybridge.CopyRequiredError):
        arraybridge.convert_memory(there, target, copy=False)


def test_arrays_of_pyopencl_enter_pyclesperanto_and_decorated_functions(on_opencl: Any) -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    image = arraybridge.to_pyclesperanto(on_opencl(x))
    np.testing.assert_array_equal(arraybridge.to_numpy(image), x)
    np.testing.assert_array_equal(arraybridge.numpy(lambda a: a["x"] + 1)({"x": on_opencl(x)}), x + 1)


def test_arrays_of_numbas_simulator_are_sources() -> None:
    pytest.importorskip("numba")
    env = {**os.environ, "PYTHONPATH": str(Path(arraybridge.__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=120, check=False, env=env
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "[1.0, 2.0, 3.0, 4.0] float32 [198.0, 4.0, 6.0, 8.0] False\nrefused\n"
