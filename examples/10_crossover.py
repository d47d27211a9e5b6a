"""
CPU, OpenCL or @gpu: which is faster?
=====================================

A device computes fast, but transfers take time. This program times a median filter on
the CPU, on an OpenCL device including transfers, and under ``@gpu``, which chooses the
device. The device pays for sizes above the point at which its line crosses that of the
CPU.
"""

# %%
# Three implementations
# ---------------------
# Each function computes the median of each pixel and the 12 around it. All three accept
# and return NumPy arrays.
import textwrap

import matplotlib.pyplot as plt
import numpy as np
import scipy.ndimage

import arraybridge as ab

disc = [(y, x) for y in range(-2, 3) for x in range(-2, 3) if y * y + x * x <= 4]
neighborhood = np.zeros((5, 5), bool)
for y, x in disc:
    neighborhood[y + 2, x + 2] = True


def on_cpu(image):
    return scipy.ndimage.median_filter(image, footprint=neighborhood, mode="nearest")


@ab.pyclesperanto(output_type="input")
def on_opencl(image):
    import pyclesperanto as cle

    return cle.median(image, radius_x=2, radius_y=2, connectivity="sphere")


@ab.gpu
def with_gpu(image):
    """Return the inner part. Runs in CuPy, PyTorch or JAX on a GPU, else in NumPy."""
    xp = ab.array_namespace(image)
    h, w = image.shape
    shifted = xp.stack([image[2 + y : h - 2 + y, 2 + x : w - 2 + x] for y, x in disc])
    return xp.sort(shifted, axis=0)[6]


# %%
# The times
# ---------

rng = np.random.default_rng(0)
sides = [32, 64, 128, 256, 512]
functions = {
    "CPU (SciPy)": on_cpu,
    "OpenCL (pyclesperanto)": on_opencl,
    "@gpu": with_gpu,
}
seconds = {name: [] for name in functions}
for side in sides:
    image = rng.random((side, side), dtype=np.float32)
    assert np.array_equal(on_cpu(image), on_opencl(image))  # equal values
    assert np.array_equal(on_cpu(image)[2:-2, 2:-2], with_gpu(image))
    for name, function in functions.items():
        seconds[name].append(ab.benchmark(function, image, seconds=0.2).median)

for name, times in seconds.items():
    print(f"{name:22}", *(f"{t * 1e3:9.2f} ms" for t in times))

# %%
# The crossover
# -------------

figure, axis = plt.subplots(figsize=(4.8, 4.4), layout="constrained")
for (name, times), style in zip(seconds.items(), ("o-", "s-", "^-"), strict=True):
    axis.loglog(sides, np.array(times) * 1e3, style, label=name)
axis.set_xticks(sides, [str(side) for side in sides])
axis.minorticks_off()
axis.set(xlabel="pixels along each side", ylabel="milliseconds, with transfers")
axis.set_title("Time of a median filter by the size of the image", size=11)
axis.legend(fontsize=9)

pairs = zip(
    sides, seconds["CPU (SciPy)"], seconds["OpenCL (pyclesperanto)"], strict=True
)
faster = [side for side, cpu, opencl in pairs if opencl < cpu]
print("Sides at which OpenCL is faster than SciPy here:", faster or "none")
print("The devices:", *ab.devices(), ab.device_info(), sep="\n")
plt.show()

# %%
# On a machine without a GPU, the OpenCL device is the CPU, so there is little to gain.
# With a GPU, the lines diverge, and ``@gpu`` follows the faster one. ``explain``
# returns the decision for the next call, and its reason:

for line in str(with_gpu.explain(image)).splitlines():
    print(textwrap.fill(line, 95))
