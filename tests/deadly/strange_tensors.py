"""`__dlpack__` of a TensorFlow string, resource or variant tensor aborts: each is refused, to each target."""

from __future__ import annotations

import tensorflow as tf

from arraybridge import convert_memory, explain
from tests.deadly._common import outcome_of, report

VARIABLE = tf.Variable([1.0, 2.0])
CASES = {
    "string scalar": tf.constant("text"),
    "string vector": tf.constant(["a", "bc"]),
    "resource": VARIABLE.handle,
    "variant": tf.raw_ops.EmptyTensorList(element_shape=[2], max_num_elements=3, element_dtype=tf.float32),
    "quantized": tf.bitcast(tf.constant([1], tf.int8), tf.qint8),
    "ragged": tf.ragged.constant([[1.0], [2.0, 3.0]]),
}

for name, tensor in CASES.items():
    for target in ("numpy", "torch", "jax"):
        told = outcome_of(lambda: explain(tensor, target))  # noqa: B023
        done = outcome_of(lambda: convert_memory(tensor, target))  # noqa: B023
        copied = outcome_of(lambda: convert_memory(tensor, target, copy=True))  # noqa: B023
        refused = told == done == copied == "refused"
        report(f"{name} -> {target}", "refused" if refused else (told, done, copied))
