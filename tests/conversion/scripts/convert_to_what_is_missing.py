"""Where no framework but NumPy can be found, ask for each of the others; print the errors as JSON."""

import json

import numpy as np

import arraybridge
from tests.conversion.scripts.blocker import hide

hide()
report = {}
for name in ("cupy", "torch", "jax", "tensorflow", "pyclesperanto"):
    try:
        arraybridge.convert_memory(np.zeros(3), name)
    except arraybridge.MemoryConversionError as error:
        report[name] = {
            "class": type(error).__name__,
            "message": str(error),
            "target_type": error.target_type,
            "reason": error.reason,
            "import error": isinstance(error, ImportError),
            "cause": type(error.__cause__).__name__,
        }
print(json.dumps(report))
