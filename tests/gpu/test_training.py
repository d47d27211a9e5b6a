"""Mixed precision on a card, around a decorated function that runs on a stream of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import prefetch
from tests.helpers import needs_kernels_of, require

pytestmark = pytest.mark.gpu


def test_mixed_precision_and_batches_that_are_fetched_ahead() -> None:
    needs_kernels_of("torch")
    torch = require("torch")
    rng = np.random.default_rng(0)
    batches = [rng.standard_normal((64, 32)).astype(np.float32) for _ in range(20)]

    def trained(decorate: bool) -> list[Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cuda")

        def loss_of(x: Any) -> Any:
            return model(x).square().mean()

        if decorate:
            loss_of = arraybridge.torch(gpu_id=0)(loss_of)
        items = prefetch(batches, "torch", 0) if decorate else (torch.tensor(x).cuda() for x in batches)
        for x in items:
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16):
                loss = loss_of(x)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return [p.detach().cpu() for p in model.parameters()]

    for found, expected in zip(trained(True), trained(False), strict=True):
        torch.testing.assert_close(found, expected)
