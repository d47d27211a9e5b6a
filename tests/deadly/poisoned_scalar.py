"""TensorFlow caches its scalars: what is written through a tensor made of one must not reach the cache."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import tensorflow as tf

from arraybridge import convert_memory
from tests.deadly._common import report

tensor = convert_memory(tf.constant(2.0), "torch")
tensor.fill_(99.0)
report("tf.constant(2.0)", float(tf.constant(2.0)))
report("2.0 + 2.0", float(tf.constant(2.0) + tf.constant(2.0)))

array = convert_memory(tf.constant(3.0), "numpy")
if array.flags.writeable:
    array[...] = 99.0
report("tf.constant(3.0)", float(tf.constant(3.0)))

scalar = jnp.float32(4.0)
convert_memory(scalar, "torch").fill_(99.0)
report("jnp.float32(4.0)", float(scalar))

array = convert_memory(scalar, "numpy")
if array.flags.writeable:
    array[...] = 99.0
report("jnp.float32(4.0) again", float(jnp.float32(4.0)))

through = convert_memory(convert_memory(tf.constant(5.0), "jax"), "torch")
through.fill_(99.0)
report("tf.constant(5.0)", float(tf.constant(5.0)))
report("numpy scalar arrays", float(np.asarray(convert_memory(tf.constant(5.0), "numpy"))))
