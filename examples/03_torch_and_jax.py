"""
A torch model with a layer in JAX, trained through both
=======================================================

A deblurring layer is written in JAX, since it is a Fourier transform and a formula; a
small network in torch cleans up behind it. One ``backward()`` goes through both, and
the layer learns how wide the blur was.
"""

# %%
# A picture, blurred with a Gaussian of width 2, with noise on top.
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import skimage
import torch

import arraybridge as ab

sharp = skimage.util.img_as_float32(skimage.data.camera()[60:188, 170:298])
rng = np.random.default_rng(0)
blurred = skimage.filters.gaussian(sharp, 2.0, mode="wrap") + rng.normal(
    0, 0.01, sharp.shape
)
blurred = torch.from_numpy(blurred.astype(np.float32))
target = torch.from_numpy(sharp)


# %%
# The layer in JAX
# ----------------
# Wiener's formula: divide by the blur where it left something, and hold back where only
# noise remains. ``grad="flow"`` lets gradients of torch go through it.

frequency = jnp.fft.fftfreq(128)
radius = frequency[:, None] ** 2 + frequency[None, :] ** 2


@ab.jax(grad="flow")
@jax.jit
def wiener(image, width, noise):
    transfer = jnp.exp(-2 * (jnp.pi * width) ** 2 * radius)  # of a Gaussian
    spectrum = jnp.fft.fft2(image) * transfer / (transfer**2 + noise**2)
    return jnp.real(jnp.fft.ifft2(spectrum))


# %%
# The model in torch
# ------------------


class Deblur(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.width = torch.nn.Parameter(torch.tensor(1.0))  # the truth is 2
        self.noise = torch.nn.Parameter(torch.tensor(0.2))
        self.clean = torch.nn.Sequential(
            torch.nn.Conv2d(1, 8, 5, padding=2),
            torch.nn.ReLU(),
            torch.nn.Conv2d(8, 1, 5, padding=2),
        )

    def forward(self, image):
        rough = wiener(image, self.width, self.noise)[None]  # through JAX
        return (rough + self.clean(rough))[0]  # through torch


torch.manual_seed(0)
model = Deblur()
groups = [
    {"params": [model.width, model.noise], "lr": 0.02},
    {"params": model.clean.parameters(), "lr": 0.002},
]
optimiser = torch.optim.Adam(groups)
losses, widths = [], []
for _ in range(100):
    optimiser.zero_grad()
    loss = ((model(blurred) - target) ** 2).mean()
    loss.backward()
    optimiser.step()
    losses.append(loss.item())
    widths.append(model.width.item())
print(
    f"loss {losses[0]:.4f} → {losses[-1]:.4f}; width {widths[0]:.2f} → {widths[-1]:.2f}"
)
assert losses[-1] < losses[0]

# %%
# What it learned
# ---------------

with torch.no_grad():
    restored = model(blurred)

figure, axes = plt.subplots(2, 2, figsize=(4.8, 5.0), layout="constrained")
pictures = {"blurred, with noise": blurred, "restored": restored}
for axis, (title, picture) in zip(axes[0], pictures.items(), strict=True):
    axis.imshow(picture, cmap="gray", vmin=0, vmax=1)
    axis.set_title(title, size=11)
    axis.axis("off")
axes[1, 0].semilogy(losses)
axes[1, 0].set_title("loss", size=11)
axes[1, 1].plot(widths)
axes[1, 1].axhline(2, color="grey", linestyle=":")
axes[1, 1].set_title("width (truth: 2)", size=11)
for axis in axes[1]:
    axis.set_xlabel("step")
plt.show()

# %%
# :doc:`/gradients` has the other directions, second derivatives, and what is refused.
