"""
Find a hidden copy with arraybridge trace
=========================================

A loop is slower than it should be, and nothing in it looks like a copy. ``arraybridge
trace`` runs the script as it is, and shows which of its lines copy, how much, and why.
"""

# %%
# The script
# ----------
# It turns pictures the right way up, and measures windows of them in torch.
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import skimage

import arraybridge

SCRIPT = """\
import numpy as np
import skimage
import arraybridge

pictures = np.stack([skimage.data.camera()] * 32)
upright = pictures[:, ::-1]  # they were upside down

@arraybridge.torch(output_type="numpy")
def brightness(pictures, corner):
    window = pictures[:, corner : corner + 64, corner : corner + 64]
    return window.float().mean(dim=(1, 2))

for corner in range(0, 400, 20):
    brightness(upright, corner)
"""

folder = tempfile.TemporaryDirectory()
script = Path(folder.name) / "measure.py"
script.write_text(SCRIPT)

# %%
# Traced
# ------
# In a shell this is ``arraybridge trace measure.py``.

command = [sys.executable, "-m", "arraybridge", "trace", script.name]
narrow = {**os.environ, "COLUMNS": "72"}
done = subprocess.run(
    command, cwd=folder.name, env=narrow, capture_output=True, text=True, check=True
)
print(done.stdout)
folder.cleanup()

# %%
# The reversed view cannot be shared with torch, which has no negative strides. So each
# call copies it, 20 times the same bytes.
#
# The same within a program
# -------------------------
# ``trace()`` around some lines gives the same table, as an object.

pictures = np.stack([skimage.data.camera()] * 32)
upright = pictures[:, ::-1]


@arraybridge.torch(output_type="numpy")
def brightness(pictures, corner):
    window = pictures[:, corner : corner + 64, corner : corner + 64]
    return window.float().mean(dim=(1, 2))


with arraybridge.trace() as before:
    for corner in range(0, 400, 20):
        brightness(upright, corner)

spot = before.hotspots()[0]
print(f"{spot.nbytes / 2**20:.0f} MiB copied, because {spot.reason}")

# %%
# Without the copy
# ----------------
# One copy before the loop lies as torch can share it.

once = np.ascontiguousarray(upright)
with arraybridge.trace() as after:
    for corner in range(0, 400, 20):
        brightness(once, corner)
assert after.total_bytes_copied == 0

seconds = [
    arraybridge.benchmark(brightness, stack, 3, runs=20).minimum
    for stack in (upright, once)
]
print(f"a call: {seconds[0] * 1e3:.2f} ms before, {seconds[1] * 1e3:.2f} ms after")

figure, axes = plt.subplots(1, 2, figsize=(4.8, 3.0), layout="constrained")
copied = [log.total_bytes_copied / 2**20 for log in (before, after)]
for axis, (title, values) in zip(
    axes,
    {
        "MiB copied in 20 calls": copied,
        "ms for a call": np.array(seconds) * 1e3,
    }.items(),
    strict=True,
):
    bars = axis.bar(["before", "after"], values, color=["tab:red", "tab:green"])
    axis.bar_label(bars, fmt="%.3g")
    axis.set_title(title, size=11)
    axis.margins(y=0.15)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
plt.show()
