"""A program that sets its variables first and spawns; it is read and never run."""

import multiprocessing
import os

os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"

import jax

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    with context.Pool(2) as pool:
        print(pool.map(abs, [-1]), jax.devices())
