"""`__dlpack__` of a TensorFlow string, resource or variant tensor aborts: all conversions raise."""

from __future__ import annotations

import tensorflow as tf

from arraybridge import MemoryConversionError, convert_memory, explain

VARIABLE = tf.Variable([1.0, 2.0])
for tensor in (
    tf.constant("text"),
    tf.constant(["a", "bc"]),
    VARIABLE.handle,
    tf.raw_ops.EmptyTensorList(element_shape=[2], max_num_elements=3, element_dtype=tf.float32),
    tf.bitcast(tf.constant([1], tf.int8), tf.qint8),
):
    for target in ("numpy", "torch", "jax"):
        for call, options in ((explain, {}), (convert_memory, {}), (convert_memory, {"copy": True})):
            try:
                call(tensor, target, **options)
            except MemoryConversionError:
                continue
            raise AssertionError(f"{tensor.dtype} to {target}: {call.__name__}, {options}")
