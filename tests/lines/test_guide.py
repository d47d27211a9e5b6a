"""The guide's model, whose halves name two cards; where they are missing, the host stands in on request."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import Pipeline
from tests.helpers import needs_kernels_of, require


class Model:
    """An encoder on one card and a decoder on another."""

    def __init__(self, torch: Any, devices: tuple[str, str]) -> None:
        torch.manual_seed(0)
        self.encoder = torch.nn.Linear(64, 128).to(devices[0])
        self.decoder = torch.nn.Linear(128, 10).to(devices[1])

    @arraybridge.torch(gpu_id=0)
    def encode(self, x: Any) -> Any:
        return self.encoder(x).relu()

    @arraybridge.torch(gpu_id=1, output_type="numpy", grad="detach")
    def decode(self, x: Any) -> Any:
        return self.decoder(x)


def check(model: Model) -> None:
    batch = np.random.default_rng(1).standard_normal((32, 64)).astype(np.float32)
    w1, b1 = (p.detach().cpu().numpy() for p in model.encoder.parameters())
    w2, b2 = (p.detach().cpu().numpy() for p in model.decoder.parameters())
    expected = np.maximum(batch @ w1.T + b1, 0) @ w2.T + b2
    scores = Pipeline(model.encode, model.decode, microbatches=4)(batch)
    assert isinstance(scores, np.ndarray)
    np.testing.assert_allclose(scores, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore::arraybridge.MissingGpuWarning")
def test_the_model_of_the_guide_where_both_cards_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = require("torch")
    if torch.accelerator.is_available():
        pytest.skip("there is a card; the test below uses it")
    with pytest.raises(arraybridge.DeviceNotFoundError, match="gpu:0"):
        check(Model(torch, ("cpu", "cpu")))
    monkeypatch.setenv("ARRAYBRIDGE_MISSING_GPU", "host")
    check(Model(torch, ("cpu", "cpu")))


@pytest.mark.gpu
def test_the_model_of_the_guide_on_two_cards() -> None:
    needs_kernels_of("cuBLAS")
    torch = require("torch")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two cards")
    check(Model(torch, ("cuda:0", "cuda:1")))
