"""Prints the frameworks that the one-line questions about devices have imported, or "nothing"."""

from __future__ import annotations

import sys

import arraybridge

arraybridge.gpu_available()
arraybridge.device_info()
arraybridge.least_used_gpu()
arraybridge.get_device()
with arraybridge.use_device("cpu"):
    arraybridge.devices("numpy")
found = {"cupy", "torch", "jax", "tensorflow", "pyclesperanto"} & set(sys.modules)
print(" ".join(sorted(found)) or "nothing")
