"""Explain a conversion that would copy 256 MiB; print by how much the process grew, and what it loaded."""

import json
import sys

import numpy as np
import psutil

import arraybridge

FRAMEWORKS = ("cupy", "jax", "tensorflow", "torch", "pyclesperanto", "pyclesperanto_prototype")

arraybridge.explain(np.zeros(3), "torch")  # imports torch
array = np.ones(2**25)[::-1]
process = psutil.Process()
before = process.memory_info().rss
route = arraybridge.explain(array, "torch")
grown = process.memory_info().rss - before
tensor = arraybridge.convert_memory(array, "torch")
report = {
    "copies": route.copies,
    "grown": grown,
    "grown by converting": process.memory_info().rss - before,
    "loaded": [name for name in FRAMEWORKS if name in sys.modules],
}
print(json.dumps(report))
