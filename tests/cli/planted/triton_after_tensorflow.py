"""A fake Triton that crashes the process if TensorFlow was imported before it."""

import os
import sys

__version__ = "3.8.0"

if "tensorflow" in sys.modules:
    os.abort()
