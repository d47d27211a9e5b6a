"""Native calls in graphs, which do not start JAX and TensorFlow, and then calls outside of graphs."""

import jax
import jax.numpy as jnp
import numpy as np
import tensorflow as tf

import arraybridge

x = np.ones(3, np.float32)
with arraybridge.trace(foreign=True) as log:
    jax.make_jaxpr(lambda y: jnp.asarray(x) + y)(jax.ShapeDtypeStruct((3,), np.float32))
    with tf.Graph().as_default():
        tf.constant(x)
    # These settings raise if the devices have started.
    jax.config.update("jax_num_cpu_devices", 2)
    tf.config.threading.set_inter_op_parallelism_threads(3)
    assert log.start_ups == []
    jnp.asarray(x)
    jnp.asarray(x)
    tf.constant(x)
    tf.constant(x)
assert len(jax.devices()) == 2
print([event.name for event in log.start_ups], [event.name for event in log.events])
