"""TensorFlow's sparse tensors."""

from __future__ import annotations

from typing import Any, ClassVar

import tensorflow as tf

from arraybridge.interface import registry
from arraybridge.interface.sparse import INT64, Expressions, Layout, SparseArrays, SparseParts

__all__ = ["TensorflowSparse"]


class TensorflowSparse(SparseArrays):
    """TensorFlow's ``tf.SparseTensor``, which has the COO layout."""

    layouts: ClassVar = {Layout.COO: INT64}
    title: ClassVar[str] = "tf.SparseTensor"

    def layout(self, x: Any) -> str:
        if isinstance(x, tf.__internal__.EagerTensor):  # faster than the next check
            return ""
        return "coo" if isinstance(x, tf.SparseTensor) else ""

    def take_apart(self, x: Any) -> SparseParts | None:
        if not isinstance(x, tf.SparseTensor):
            return None
        # A symbolic tensor may have an unknown shape. Its parts are rejected later.
        shape = tuple(x.shape) if x.shape.rank is not None else ()
        return SparseParts(Layout.COO, shape, x.values, (x.indices,))

    def put_together(self, parts: SparseParts, like: Any = None) -> Any:
        with registry.framework("tensorflow").runtime.device_guard(parts.values):
            return tf.SparseTensor(parts.indices[0], parts.values, parts.shape)

    def expressions(self, x: Any) -> Expressions:
        return Expressions("{x}.values", {}, "tf.sparse.to_dense({x})", elements="{x}.values")
