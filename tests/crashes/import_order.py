"""The frameworks imported in the order of the arguments, then one array sent round through all of them.

As one of several scripts (together.py), which has to be the first of them, it takes an order of its own.
Nothing is set in the environment: an OpenCL driver that came as a wheel is found by the library.
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
    if name != "pyclesperanto":  # imported by the library, when its turn comes
        importlib.import_module(name)
    else:
        arraybridge.convert_memory(np.ones((4, 4), np.float32), "pyclesperanto")

VALUES = np.arange(24, dtype=np.float32).reshape(4, 6)
array = VALUES
for name in order * 2:
    array = arraybridge.convert_memory(array, name)
    assert framework_of(array) == name
    assert bits(array) == VALUES.tobytes()
