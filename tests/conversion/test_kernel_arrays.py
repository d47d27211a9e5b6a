"""Arrays of libraries for kernels of one's own: pyopencl's, and numba.cuda's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arraybridge
from tests.helpers import require, run_python


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


SIMULATED = """
import numpy as np
from numba import cuda
import arraybridge

@cuda.jit
def add_one(x):
    i = cuda.grid(1)
    if i < x.size:
        x[i] += 1

there = cuda.to_device(np.arange(4, dtype=np.float32))
add_one[1, 4](there)
x = arraybridge.convert_memory(there, "numpy")
there[0] = 99  # what came is a copy
doubled = arraybridge.numpy(lambda y: y * 2)(there)
print(x.tolist(), x.dtype, doubled.tolist(), arraybridge.explain(there, "numpy").shares_memory)
try: arraybridge.convert_memory(there, "numpy", copy=False)
except arraybridge.CopyRequiredError: print("refused")
"""


def test_arrays_of_numbas_simulator_are_sources(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    script = tmp_path / "simulated.py"  # numba reads the kernel's source
    script.write_text(SIMULATED, encoding="utf-8")
    done = run_python(str(script), env={"NUMBA_ENABLE_CUDASIM": "1"})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "[1.0, 2.0, 3.0, 4.0] float32 [198.0, 4.0, 6.0, 8.0] False\nrefused\n"
