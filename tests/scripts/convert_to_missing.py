"""Ask twice for a framework that can't be imported, and print both answers."""

import sys

import numpy as np

import arraybridge

# None in sys.modules makes an import fail as if the package were not there.
sys.modules["torch"] = None  # type: ignore[assignment]
for _ in range(2):
    try:
        arraybridge.convert_memory(np.arange(3), "torch")
    except arraybridge.FrameworkNotInstalledError as error:
        print(type(error).__name__)
