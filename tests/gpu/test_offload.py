"""@gpu on a card: where calls run, what comes back, and what is measured and kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arraybridge.offload.machine import Card
from arraybridge.offload.rates_file import load_rates

import arraybridge
from arraybridge.offload import decision
from arraybridge.offload.decorator import gpu, stay_on_gpu
from tests.helpers import EMULATED, needs_kernels_of, require

pytestmark = pytest.mark.gpu

BACKENDS = ("cupy", "torch", "jax")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    decision.machine.forget()
    yield tmp_path / "arraybridge"
    decision.machine.forget()


def heavy(x: Any) -> Any:
    """Seconds on a CPU, milliseconds on a card."""
    for _ in range(8):
        x = x @ x / 1000
    return x


@pytest.mark.parametrize("backend", BACKENDS)
def test_heavy_work_goes_to_the_card_and_comes_back(backend: str) -> None:
    needs_kernels_of("cuBLAS")
    require(backend)
    fn = gpu(backend=backend)(heavy)
    x = np.random.default_rng(0).random((1024, 1024), dtype=np.float32)
    expected = heavy(x)
    for _ in range(5):
        result = fn(x)
        assert type(result) is np.ndarray
        assert result.dtype == np.float32
        # Cards may multiply in fewer digits (TF32).
        assert np.allclose(result, expected, rtol=5e-2)
    decision = fn.explain(x)
    assert decision.on_gpu, str(decision)
    assert decision.backend == backend
    assert decision.device == "gpu:0"
    assert any(r.place == f"{backend} gpu:0" for r in fn.history)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rates_are_plausible_and_kept(backend: str, cache: Path) -> None:
    require(backend)
    card = decision.machine.find(backend, 0)
    assert isinstance(card, Card)
    rates = card.rates
    for link in (rates.to_card, rates.to_host):
        assert link.latency > 1e-7
        assert link.bandwidth < 1e12
        assert EMULATED or (link.latency < 1e-2 and link.bandwidth > 1e8)
    assert rates.launch > 1e-7
    assert EMULATED or rates.launch < 1e-2  # the emulation is as slow as the machine is busy
    assert load_rates(cache, card.key()) == rates
    assert card.key()["card"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_cheap_work_stays_on_the_cpu(backend: str) -> None:
    require(backend)
    fn = gpu(backend=backend)(lambda x: x + 1)
    x = np.zeros(1000)
    for _ in range(6):
        assert fn(x)[0] == 1.0
    assert not fn.explain(x).on_gpu


@pytest.mark.parametrize("backend", BACKENDS)
def test_staying_on_the_card(backend: str) -> None:
    needs_kernels_of("cuBLAS")
    require(backend)
    fn = gpu(backend=backend)(heavy)
    x = np.eye(1024, dtype=np.float32) * 1000
    for _ in range(4):
        fn(x)
    with stay_on_gpu():
        first = fn(x)
        second = fn(first)
    assert arraybridge.detect_memory_type(first) == backend
    assert arraybridge.device_of(second) == "gpu:0"
    assert np.allclose(arraybridge.to_numpy(second), x)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tensor_on_the_card_stays_a_tensor_there(backend: str) -> None:
    needs_kernels_of("cuBLAS")
    torch = require("torch")
    require(backend)
    fn = gpu(backend=backend)(heavy)
    x = torch.eye(1024, device="cuda") * 1000
    result = fn(x)
    assert isinstance(result, torch.Tensor)
    assert result.is_cuda
    assert torch.allclose(result, x)


def test_float64_is_kept_by_every_backend() -> None:
    needs_kernels_of("cuBLAS")
    for backend in BACKENDS:
        require(backend)
        fn = gpu(backend=backend)(heavy)
        x = np.eye(1024) * 1000
        for _ in range(4):
            assert fn(x).dtype == np.float64


def test_use_device_cpu_keeps_it_off_the_card() -> None:
    require("torch")
    fn = gpu(backend="torch")(heavy)
    x = np.eye(1024, dtype=np.float32)
    for _ in range(4):
        fn(x)
    with arraybridge.use_device("cpu"):
        assert not fn.explain(x).on_gpu
        fn(x)
