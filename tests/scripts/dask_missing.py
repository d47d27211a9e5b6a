"""Import arraybridge.dask where the packages named as arguments are not installed; print what happens."""

import sys

import numpy as np

import arraybridge
from tests.conversion.scripts.blocker import hide

hide(*sys.argv[1:])
try:
    from arraybridge.dask import cluster  # noqa: F401
except arraybridge.FrameworkNotInstalledError as error:
    print(f"{type(error).__name__}: {error}")
assert arraybridge.detect_memory_type(np.zeros(3)) == "numpy"  # all else works
