"""A fake PyTorch that crashes the process if TensorFlow was imported before it."""

import os
import sys
from types import SimpleNamespace

__version__ = "2.13.0"
version = SimpleNamespace(cuda="13.0", hip=None)

if "tensorflow" in sys.modules:
    os.abort()


def zeros(count):
    return [0] * count
