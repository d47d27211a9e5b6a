"""
Train a PyTorch model with a JAX layer
======================================

A deblurring layer is written in JAX, as a Fourier transform and a formula. A small
PyTorch network removes the remaining noise. One ``backward()`` differentiates both, and
the layer learns the width of the blur.
"""

# %%
# The data is an image, blurred with a Gaussian of width 2, with added noise.
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
# The layer is a Wiener filter: it divides by the blur, and suppresses frequencies that
# contain only noise. With ``grad="flow"``, PyTorch differentiates through it.

frequency = jnp.fft.fftfreq(128)
radius = frequency[:, None] ** 2 + frequency[None, :] ** 2


@ab.jax(grad="flow")
@jax.jit
def wiener(image, width, noise):
    transfer = jnp.exp(-2 * (jnp.pi * width) ** 2 * radius)  # of a Gaussian
    spectrum = jnp.fft.fft2(image) * transfer / (transfer**2 + noise**2)
    return jnp.real(jnp.fft.ifft2(spectrum))


# %%
# The model in PyTorch
# --------------------


class Deblur(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.width = torch.nn.Parameter(torch.tensor(1.0))  # true value: 2
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
optimizer = torch.optim.Adam(groups)
losses, widths = [], []
for _ in range(100):
    optimizer.zero_grad()
    loss = ((model(blurred) - target) ** 2).mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    widths.append(model.width.item())
print(
    f"loss {losses[0]:.4f} → {losses[-1]:.4f}; width {widths[0]:.2f} → {widths[-1]:.2f}"
)
assert losses[-1] < losses[0]

# %%
# The result
# ----------

with torch.no_grad():
    restored = model(blurred)

figure, axes = plt.subplots(2, 2, figsize=(4.8, 5.0), layout="constrained")
images = {"blurred, with noise": blurred, "restored": restored}
for axis, (title, image) in zip(axes[0], images.items(), strict=True):
    axis.imshow(image, cmap="gray", vmin=0, vmax=1)
    axis.set_title(title, size=11)
    axis.axis("off")
axes[1, 0].semilogy(losses)
axes[1, 0].set_title("loss", size=11)
axes[1, 1].plot(widths)
axes[1, 1].axhline(2, color="grey", linestyle=":")
axes[1, 1].set_title("width (true value: 2)", size=11)
for axis in axes[1]:
    axis.set_xlabel("step")
plt.show()

# %%
# :doc:`/gradients` shows the other directions and lists unsupported cases.
