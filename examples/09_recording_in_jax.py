"""
Remove noise from a recording with JAX
======================================

The signal is a NumPy array, as read from a sound file. A spectral gate is written and
compiled in JAX. Its decorator accepts and returns NumPy arrays, so the rest of the
program does not depend on JAX.
"""

# %%
# The recording has two seconds of a rising tone with overtones, in constant noise.
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
# Cut the signal into overlapping windows, transform them, remove frequencies below the
# threshold, and add the windows again. Write ``jax.jit`` below the decorator.

# Windows that overlap by half add up to one.
window = np.hanning(513)[:512].astype(np.float32)
hop = 256


def windows(signal):
    starts = jnp.arange(0, signal.shape[0] - 511, hop)
    return signal[starts[:, None] + jnp.arange(512)]


@ab.jax(output_type="input")
@jax.jit
def gated(signal, threshold):
    spectrum = jnp.fft.rfft(windows(signal) * window)
    kept = jnp.where(jnp.abs(spectrum) > threshold, spectrum, 0)
    pieces = jnp.fft.irfft(kept)
    starts = jnp.arange(pieces.shape[0]) * hop
    places = starts[:, None] + jnp.arange(512)
    return jnp.zeros_like(signal).at[places].add(pieces)


cleaned = gated(recording, 14.0)
print(type(cleaned).__name__, cleaned.dtype, cleaned.shape)

# %%
# Measure the improvement
# -----------------------


def noise_ratio(signal):
    """Return signal to noise in decibels, over the part that all windows cover."""
    inner = slice(hop, -2 * hop)
    noise = signal[inner] - tone[inner]
    return 10 * np.log10(np.sum(tone[inner] ** 2) / np.sum(noise**2))


before, after = noise_ratio(recording), noise_ratio(cleaned)
print(f"signal to noise: {before:.1f} dB before, {after:.1f} dB after")
assert after > before + 5
print(ab.benchmark(gated, recording, 14.0, runs=20))

# %%
# Spectrograms
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
