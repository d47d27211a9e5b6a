"""
Clean a recording, in JAX from NumPy
====================================

The signal comes as a NumPy array, as it would from a sound file. A spectral gate is
written in JAX, compiled, and called with it; NumPy comes back. JAX is used for what it
is good at, and the rest of the program does not know of it.
"""

# %%
# Two seconds: a rising tone with overtones, in steady hiss.
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import arraybridge as ab

rng = np.random.default_rng(0)
rate = 16_000
time = np.arange(2 * rate, dtype=np.float32) / rate
phase = 2 * np.pi * (220 * time + 110 * time**2)
tone = sum(np.sin(n * phase) / n for n in (1, 2, 3, 4)) * np.sin(np.pi * time / 2) ** 2
recording = (tone + rng.normal(0, 0.3, time.shape)).astype(np.float32)


# %%
# The gate
# --------
# Cut the signal into overlapping windows, transform them, drop what is not louder than
# the hiss, and add the windows up again. ``jax.jit`` goes inside, the decorator
# outside.

window = np.hanning(513)[:512].astype(
    np.float32
)  # windows that overlap by half add up to one
hop = 256


def windows(signal):
    starts = jnp.arange(0, signal.shape[0] - 511, hop)
    return signal[starts[:, None] + jnp.arange(512)]


@ab.jax(output_type="input")
@jax.jit
def gated(signal, floor):
    spectrum = jnp.fft.rfft(windows(signal) * window)
    kept = jnp.where(jnp.abs(spectrum) > floor, spectrum, 0)
    pieces = jnp.fft.irfft(kept)
    starts = jnp.arange(pieces.shape[0]) * hop
    places = starts[:, None] + jnp.arange(512)
    return jnp.zeros_like(signal).at[places].add(pieces)


cleaned = gated(recording, 14.0)
print(type(cleaned).__name__, cleaned.dtype, cleaned.shape)

# %%
# How much better is it?
# ----------------------


def noise_ratio(signal):
    """Signal to noise in decibels, over the part that all windows cover."""
    inner = slice(hop, -2 * hop)
    wrong = signal[inner] - tone[inner]
    return 10 * np.log10(np.sum(tone[inner] ** 2) / np.sum(wrong**2))


before, after = noise_ratio(recording), noise_ratio(cleaned)
print(f"signal to noise: {before:.1f} dB before, {after:.1f} dB after")
assert after > before + 5
print(ab.benchmark(gated, recording, 14.0, runs=20))

# %%
# As a picture
# ------------

figure, axes = plt.subplots(2, 1, figsize=(4.8, 5.6), layout="constrained", sharex=True)
signals = {"recording": recording, "cleaned": cleaned}
for axis, (title, signal) in zip(axes, signals.items(), strict=True):
    audible = signal + 1e-6 * rng.standard_normal(len(signal))  # no logarithm of zero
    axis.specgram(audible, NFFT=512, Fs=rate, noverlap=256, vmin=-120, vmax=-40)
    axis.set(ylim=(0, 4000), ylabel="hertz")
    axis.set_title(f"{title}: {noise_ratio(signal):.1f} dB over the noise", size=11)
axes[-1].set_xlabel("seconds")
plt.show()
