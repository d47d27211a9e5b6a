"""A program that does too late what it does, and forks; it is read and never run."""

import multiprocessing
import os

import jax
import torch

os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
os.environ.update({"JAX_PLATFORMS": "cpu"})
os.environ["UNRELATED"] = "1"

if __name__ == "__main__":
    multiprocessing.set_start_method("fork")
    print(jax.devices(), torch.zeros(1))
