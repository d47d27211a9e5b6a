"""TensorFlow caches its scalars: what is written through a tensor made of one must not reach the cache."""

from __future__ import annotations

import jax.numpy as jnp
import tensorflow as tf

from arraybridge import convert_memory
from tests.deadly._common import report

convert_memory(tf.constant(2.0), "torch").fill_(99.0)
report("tf.constant(2.0)", float(tf.constant(2.0)))
report("2.0 + 2.0", float(tf.constant(2.0) + tf.constant(2.0)))

scalar = jnp.float32(4.0)
convert_memory(scalar, "torch").fill_(99.0)
for array in (convert_memory(tf.constant(3.0), "numpy"), convert_memory(scalar, "numpy")):
    if array.flags.writeable:
        array[...] = 99.0
report("tf.constant(3.0)", float(tf.constant(3.0)))
report("jnp.float32(4.0)", float(scalar))

convert_memory(convert_memory(tf.constant(5.0), "jax"), "torch").fill_(99.0)
report("tf.constant(5.0)", float(tf.constant(5.0)))
