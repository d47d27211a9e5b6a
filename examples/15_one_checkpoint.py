"""
One checkpoint in three frameworks
==================================

A PyTorch model is saved once. NumPy, PyTorch and JAX then compute with its weights. All
of them map the file, so the process needs the memory of one copy for all three.
"""

# %%
# The model has 64 MiB of weights.
import tempfile
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
import psutil
import torch

import arraybridge as ab

MIB = 2**20

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(2048, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 2048)
)
x = np.random.default_rng(0).random((16, 2048), np.float32)

folder = tempfile.TemporaryDirectory()
path = Path(folder.name) / "model.safetensors"
ab.save_safetensors(path, model.state_dict(), {"format": "pt"})
size = path.stat().st_size / MIB
print(f"the file: {size:.0f} MiB")


# %%
# The same layers for each framework, with its own functions. Each is called once with
# the original weights, because the libraries start threads, and JAX compiles.
def in_numpy(weights):
    hidden = np.maximum(x @ weights["0.weight"].T + weights["0.bias"], 0)
    return hidden @ weights["2.weight"].T + weights["2.bias"]


@torch.no_grad()
def in_torch(weights):
    return torch.func.functional_call(model, weights, torch.from_numpy(x))


@jax.jit
def in_jax(weights):
    hidden = jax.nn.relu(x @ weights["0.weight"].T + weights["0.bias"])
    return hidden @ weights["2.weight"].T + weights["2.bias"]


functions = {"numpy": in_numpy, "torch": in_torch, "jax": in_jax}
for name, function in functions.items():
    weights = ab.convert_tree(model.state_dict(), name)
    expected = ab.to_numpy(function(weights), copy=True)
del weights

# %%
# Load and compute
# ----------------
# ``load_safetensors`` reads the header. Its result is a dict, and ``convert_tree``
# converts every array in it. The memory of the process is measured after each step.
process = psutil.Process()
before = process.memory_info().rss
steps = []


def record(step):
    steps.append((step, (process.memory_info().rss - before) / MIB))


with ab.trace() as log:
    arrays = ab.load_safetensors(path)
    trees = {name: ab.convert_tree(arrays, name) for name in functions}
record("loaded")

for name, function in functions.items():
    result = ab.to_numpy(function(trees[name]))
    assert np.allclose(result, expected, atol=1e-5)
    record(f"after {name}")

print(f"{len(log.records)} conversions, {log.total_bytes_copied} bytes copied")
for step, used in steps:
    print(f"{step:12} {used:6.1f} MiB")

assert log.total_bytes_copied == 0
assert steps[0][1] < size / 4
assert steps[-1][1] < 1.5 * size

# %%
# The first framework reads the pages of the file, and the other two use the same pages.
# They are not copies: the system can drop them, and share them with other processes.
figure, axis = plt.subplots(figsize=(4.8, 3), layout="constrained")
axis.bar([step for step, _ in steps], [used for _, used in steps])
axis.axhline(3 * size, color="0.5", label="three copies of the weights")
axis.axhline(size, color="0.5", linestyle="--", label="the file")
axis.set(ylabel="MiB since the start")
axis.legend(loc="center left")

# %%
# PyTorch trains on the mapped weights. Writes are private to the process, so the file
# does not change.
trees["torch"]["0.bias"].zero_()
assert not arrays["0.bias"].any()
assert ab.load_safetensors(path)["0.bias"].any()

del arrays, trees
folder.cleanup()
plt.show()

# %%
# :doc:`/safetensors` has the options and limits.
