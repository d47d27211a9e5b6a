"""Prints how many functions of the package warm calls enter: two that may be split, and a pipeline."""

from __future__ import annotations

from typing import Any

import numpy as np

import arraybridge
from tests.counting import functions_entered

fails = [False]
x = np.ones((8, 4), np.float32)


@arraybridge.torch(oom_recovery="split", output_type="numpy")
def work(x: Any) -> Any:
    if fails[0]:
        fails[0] = False
        raise MemoryError
    return x + 1


def failing() -> Any:
    fails[0] = True
    return work(x)


pipeline = arraybridge.Pipeline(
    arraybridge.torch(lambda x: x + 1), arraybridge.numpy(lambda x: x * 2), microbatches=1
)

for call in (lambda: work(x), failing, lambda: pipeline(x)):
    for _ in range(3):
        call()
    print(len(functions_entered(call)))
