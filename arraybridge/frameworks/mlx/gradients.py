"""Derivatives of MLX, as the caller and as the callee."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from arraybridge.frameworks.autodiff import Autodiff

__all__ = ["MlxAutodiff"]


class MlxAutodiff(Autodiff):
    """``settle``: computes an array, or says why that cannot be."""

    def __init__(self, settle: Callable[[Any], None]) -> None:
        self._settle = settle

    def follows(self, x: Any) -> bool:
        # What a transformation follows keeps its graph when it is computed; there is no other sign.
        self._settle(x)
        graph = io.StringIO()
        mx.export_to_dot(graph, x)
        return "shape=rectangle" in graph.getvalue()
