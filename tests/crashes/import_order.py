"""Import the frameworks in the order of the arguments, then convert one array through all of them.

If it runs with other scripts (together.py), it must be the first and chooses its own order. No environment
variable is set: the library finds an OpenCL driver that was installed from a wheel.
"""

from __future__ import annotations

import importlib
import sys

import numpy as np

import arraybridge  # it imports no framework
from tests.matrix_data import bits, framework_of

order = sys.argv[1:] if __name__ == "__main__" else ["pyclesperanto", "torch", "jax", "tensorflow"]
assert not {"torch", "jax", "tensorflow"} & set(sys.modules)
for name in order:
    if name != "pyclesperanto":  # imported by the library on first use
        importlib.import_module(name)
    else:
        arraybridge.convert_memory(np.ones((4, 4), np.float32), "pyclesperanto")

VALUES = np.arange(24, dtype=np.float32).reshape(4, 6)
array = VALUES
for name in order * 2:
    array = arraybridge.convert_memory(array, name)
    assert framework_of(array) == name
    assert bits(array) == VALUES.tobytes()
