"""A TensorFlow that ends the program in silence, as some packages do where they miss something."""

import sys

__version__ = "2.21.0"

sys.exit(0)
