"""Derivatives of PaddlePaddle, as the caller and as the callee."""

from __future__ import annotations

from typing import Any

import paddle

from arraybridge.frameworks.autodiff import Autodiff

__all__ = ["AUTODIFF"]


class PaddleAutodiff(Autodiff):
    def follows(self, x: Any) -> bool:
        return not x.stop_gradient and paddle.is_grad_enabled()

    def stays_in_thread(self, x: Any) -> bool:
        return False

    def has_graph(self, x: Any) -> bool:
        return not x.stop_gradient and not x.is_leaf


AUTODIFF = PaddleAutodiff()
