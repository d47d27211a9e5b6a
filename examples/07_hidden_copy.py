"""
Find a hidden copy with arraybridge trace
=========================================

A loop is slower than it should be, and no line looks like a copy. ``arraybridge trace``
runs any script unchanged, and shows which lines copy, how much, and why.
"""

# %%
# The script
# ----------
# It uses NumPy, PyTorch and JAX, but not arraybridge.
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

SCRIPT = """\
import jax.numpy as jnp
import numpy as np
import skimage
import torch

photo = np.kron(skimage.data.camera(), np.ones((3, 3))).astype(np.float32)

total = 0
for corner in range(0, 400, 20):
    tensor = torch.tensor(photo)
    blurred = torch.nn.functional.avg_pool2d(tensor[None], 3, 1, 1)
    edges = jnp.abs(jnp.diff(jnp.asarray(blurred.cpu().numpy())))
    total += np.array(edges)[0, corner].sum()
print(f"{total:.1f}")
"""

folder = tempfile.TemporaryDirectory()


def traced(name, text):
    """Run a script under ``arraybridge trace`` and return its output."""
    Path(folder.name, name).write_text(text)
    command = [sys.executable, "-m", "arraybridge", "trace", name]
    return subprocess.run(
        command,
        cwd=folder.name,
        env={**os.environ, "COLUMNS": "72"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


# %%
# Trace it
# --------
# In a shell, run ``arraybridge trace measure.py``. The first line is the output of the
# script.

before = traced("measure.py", SCRIPT)
print(before)

# %%
# Avoid the copies
# ----------------
# Change three calls, as the arrows advise, and add one import.

changed = (
    SCRIPT.replace("import torch\n", "import torch\nimport arraybridge as ab\n")
    .replace("torch.tensor(photo)", "ab.to_torch(photo)")
    .replace("jnp.asarray(blurred.cpu().numpy())", "ab.to_jax(blurred)")
    .replace("np.array(edges)", "ab.to_numpy(edges)")
)
after = traced("changed.py", changed)
print(after)
assert before.split()[0] == after.split()[0]  # the script prints the same number
assert "no copies" in after

# %%
# Before and after
# ----------------

mebibytes = [
    float(text.split(" lines, ")[1].split()[0]) if "MiB copied" in text else 0.0
    for text in (before, after)
]

figure, axis = plt.subplots(figsize=(4.8, 3.0), layout="constrained")
bars = axis.bar(["before", "after"], mebibytes, color=["tab:red", "tab:green"])
axis.bar_label(bars, fmt="%.3g")
axis.set_title("MiB copied", size=11)
axis.margins(y=0.15)
for side in ("top", "right"):
    axis.spines[side].set_visible(False)
folder.cleanup()
plt.show()

# %%
# :doc:`/traces` lists the recorded calls, and traces a block of a program.
