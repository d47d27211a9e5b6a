"""TensorFlow: conversions, devices, memory and gradients."""

import importlib
import importlib.util
import sys

# `import triton` after `import tensorflow` crashes the process (Triton 3.8, TensorFlow 2.21,
# tensorflow/tensorflow#124205). The reverse order works. PyTorch's CUDA build installs Triton, and imports it
# only when it is needed.
if "tensorflow" not in sys.modules and importlib.util.find_spec("triton") is not None:
    importlib.import_module("triton")
