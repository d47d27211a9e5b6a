"""The first gradient of a process, inside of torch.func.grad, which wraps each tensor that is made there."""

import jax.numpy as jnp
import torch

import arraybridge

f = arraybridge.jax(grad="flow")(lambda x: jnp.sin(x).sum())
print(torch.func.grad(f)(torch.zeros(2)).tolist())
