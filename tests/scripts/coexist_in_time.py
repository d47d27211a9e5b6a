"""Call coexist() after JAX and TensorFlow were imported, but before they opened their devices."""

import os

import jax
import tensorflow as tf

import arraybridge

assert arraybridge.coexist().too_late == ()
assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
assert os.environ["TF_FORCE_GPU_ALLOW_GROWTH"] == "true"
# Neither this nor a look at the memory has opened their devices.
arraybridge.memory_stats()
arraybridge.free_memory()
assert not arraybridge.framework("jax").pool.is_started()
assert not arraybridge.framework("tensorflow").pool.is_started()
assert jax.devices()
assert tf.config.list_logical_devices()
assert arraybridge.framework("jax").pool.is_started()
assert arraybridge.framework("tensorflow").pool.is_started()
