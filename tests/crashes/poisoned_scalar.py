"""TensorFlow caches its scalars: writes through a converted tensor must not reach the cache."""

from __future__ import annotations

import jax.numpy as jnp
import tensorflow as tf

from arraybridge import convert_memory

scalar = jnp.float32(4.0)
for exported in (tf.constant(2.0), scalar, convert_memory(tf.constant(2.0), "jax")):
    convert_memory(exported, "torch").fill_(99.0)
    array = convert_memory(exported, "numpy")
    if array.flags.writeable:
        array[...] = 99.0
assert (float(tf.constant(2.0)), float(tf.constant(2.0) + tf.constant(2.0))) == (2.0, 4.0)
assert float(scalar) == 4.0
