"""pyclesperanto imported by the user, after TensorFlow and with no OpenCL driver configured: half an import.

The library may repair it or refuse it; the process goes on either way.
"""

from __future__ import annotations

import os
import warnings

os.environ.pop("OCL_ICD_FILENAMES", None)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import pyclesperanto  # noqa: F401
    import tensorflow as tf

import numpy as np

from arraybridge import convert_memory
from tests.deadly._common import outcome_of, report, report_right
from tests.matrix_data import bits

VALUES = np.arange(24, dtype=np.float32).reshape(4, 6)


def round_trip() -> str:
    there = convert_memory(tf.constant(VALUES), "pyclesperanto")
    return "right" if bits(convert_memory(there, "numpy")) == VALUES.tobytes() else "WRONG"


report("round", outcome_of(round_trip))
report_right("after it", bits(convert_memory(VALUES, "tensorflow")) == VALUES.tobytes())
