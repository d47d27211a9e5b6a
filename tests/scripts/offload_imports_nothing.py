"""Print which frameworks a process holds after it has called @gpu functions with small arrays.

With the argument ``torch`` it calls them with tensors and with a large array as well.
"""

import json
import sys
from typing import Any

import numpy as np

from arraybridge import gpu


@gpu
def double(x: Any) -> Any:
    return 2 * x


for _ in range(20):
    double(np.ones(1000))
assert not double.explain(np.ones(1000)).on_gpu

if "torch" in sys.argv:
    import torch

    assert double(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]
    assert double(np.ones(1 << 20)).shape == (1 << 20,)
    assert not double.explain(np.ones(1 << 20)).on_gpu

frameworks = {"cupy", "torch", "jax", "tensorflow", "pyclesperanto", "optree"}
print(json.dumps(sorted(frameworks & set(sys.modules))))
