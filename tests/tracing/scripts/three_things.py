"""A transposed array in a loop, three stages, and memory that runs out; the lines to be found are marked."""

import numpy as np

import arraybridge
from arraybridge.testing import inject_oom

image = np.arange(24, dtype=np.float64).reshape(6, 4).T
for _ in range(5):
    arraybridge.to_tensorflow(image)  # LOOP


@arraybridge.torch(output_type="numpy")
def double(x):
    return x * 2


@arraybridge.numpy
def flip(x):
    return x[:, ::-1]


def shift(x):
    return arraybridge.to_torch(x) + 1  # INSIDE


pipeline = arraybridge.Pipeline(double, flip, shift, microbatches=2)
batch = np.ones((4, 6))
pipeline(batch)  # PIPELINE


@arraybridge.torch(oom_recovery="split")
def half(x):
    return x / 2


with inject_oom("torch", above_rows=2):
    half(batch)  # OOM
