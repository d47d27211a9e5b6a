"""All that is peculiar to this framework."""

import importlib.util
import sys

# Importing Triton after TensorFlow crashes the process; Triton first works. PyTorch's CUDA build brings
# Triton, and imports it late.
if "tensorflow" not in sys.modules and importlib.util.find_spec("triton") is not None:
    import triton  # noqa: F401
