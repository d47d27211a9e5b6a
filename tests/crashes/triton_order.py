"""Import packages in the order of each argument, then use functions that could import Triton late.

Triton, which PyTorch's CUDA build installs, crashes the process if it is imported after TensorFlow. "ours"
means a conversion to TensorFlow, which imports it. Each order, such as "torch ours", runs in a forked copy of
this process, which has imported packages that TensorFlow imports, but neither TensorFlow nor PyTorch.
Prints a line per order.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import numpy as np

import arraybridge as ab

for name in ("jax", "pandas", "matplotlib.pyplot"):
    importlib.import_module(name)
for order in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        break
    _, status = os.waitpid(child, 0)
    if status:
        print(order, f"ended with {os.waitstatus_to_exitcode(status)}", sep="\t", flush=True)
else:
    sys.exit()

for name in order.split():
    if name == "ours":
        ab.to_tensorflow(np.ones(3))
    else:
        importlib.import_module(name)

# Nothing here adds a framework to the order above, except JAX.
is_safe = "triton" in sys.modules

import jax  # noqa: E402  # after the imports above, whose order is tested
import tensorflow as tf  # noqa: E402
import torch  # noqa: E402

X = np.linspace(0.1, 1.3, 12, dtype=np.float32).reshape(4, 3)
SLOPE = np.sin(X) + X * np.cos(X)


def check(found: Any, expected: np.ndarray[Any, Any]) -> None:
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-5)


# grad="flow", in both directions.
in_torch = ab.torch(grad="flow")(lambda x: torch.sin(x) * x)
source = tf.constant(X)
with tf.GradientTape() as tape:
    tape.watch(source)
    y = in_torch(source)
check(tape.gradient(y, source), SLOPE)
check(jax.grad(lambda x: in_torch(x).sum())(jax.numpy.asarray(X)), SLOPE)
in_tensorflow = ab.tensorflow(grad="flow")(lambda x: tf.sin(x) * x)
leaf = torch.tensor(X, requires_grad=True)
in_tensorflow(leaf).sum().backward()
check(leaf.grad, SLOPE)

# Inside jax.jit, PyTorch predicts shapes in FakeTensorMode, which imports Triton.
try:
    check(jax.jit(in_torch)(X), np.sin(X) * X)
    predicted = True
except ab.GradientError as error:
    if "import triton" not in str(error):
        raise
    predicted = False
assert predicted == is_safe


@ab.gpu
def total(x: Any) -> Any:
    return np.sin(x).sum()


with ab.settings(annotate="torch"), ab.trace(foreign=True) as log:
    check(total(X), np.sin(X).sum())
    check(torch.tensor(X).numpy(), X)
    check(ab.torch(oom_recovery="split")(lambda x: x * 2)(X), X * 2)
    (doubled,) = ab.device_map(ab.torch(lambda x: x * 2), [X], ["cpu"])
    check(doubled, X * 2)
    check(ab.Pipeline(ab.torch(lambda x: x * 2), ab.tensorflow(lambda x: x + 1))(X), X * 2 + 1)
assert log.hotspots()
total.explain(X)
ab.free_memory()
ab.memory_stats()
ab.benchmark(total, X)
assert ("triton" in sys.modules) == is_safe
print(order, f"right, {is_safe}", sep="\t", flush=True)
