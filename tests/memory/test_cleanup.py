"""Releasing caches, selecting devices and sharing a GPU between frameworks, tested without a GPU."""

from __future__ import annotations

import os
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import DeviceNotFoundError, free_memory, gpu_context, hardware
from arraybridge.device import Device
from arraybridge.memory import gpu_sharing
from tests.helpers import require
from tests.memory.fake_framework import FakeFramework

SINGLE = {
    "torch": arraybridge.cleanup_torch_gpu,
    "cupy": arraybridge.cleanup_cupy_gpu,
    "jax": arraybridge.cleanup_jax_gpu,
    "tensorflow": arraybridge.cleanup_tensorflow_gpu,
    "pyclesperanto": arraybridge.cleanup_pyclesperanto_gpu,
}


def test_freed_bytes_are_returned(fake: FakeFramework) -> None:
    assert free_memory("fake", 1) == 30
    assert free_memory("fake") == 50
    assert free_memory("fake") == 0
    assert fake.freed == [(Device("gpu", 1), False), (None, False), (None, False)]


@pytest.mark.parametrize("name", SINGLE)
def test_every_framework_frees_its_memory(name: str) -> None:
    require(name)
    assert SINGLE[name]() >= 0
    assert free_memory(name, compiled=True) >= 0


def test_jax_recompiles_after_its_programs_were_cleared() -> None:
    jax = require("jax")
    traced = []

    @jax.jit
    def double(x: Any) -> Any:
        traced.append(1)
        return x * 2

    x = np.ones(3, np.float32)
    double(x)
    free_memory("jax")
    double(x)
    assert len(traced) == 1
    free_memory("jax", compiled=True)
    double(x)
    assert len(traced) == 2


@pytest.mark.parametrize("bad", [-1, True, 0.0, "auto", "gpu:0"])
def test_bad_numbers(bad: Any) -> None:
    fix = "Pass the number of a GPU, such as 0 or least_used_gpu(), or None."
    with pytest.raises(ValueError, match=re.escape(f"free_memory() does not accept gpu_id={bad!r}. {fix}")):
        free_memory(gpu_id=bad)
    problem = re.escape(f"gpu_context() does not accept gpu_id={bad!r}. {fix}")
    with pytest.raises(ValueError, match=problem), gpu_context(bad):
        pass


def test_missing_gpus_raise(fake: FakeFramework) -> None:
    with pytest.raises(DeviceNotFoundError, match="fake has gpu:0, gpu:1"):
        free_memory("fake", 2)
    with arraybridge.settings(missing_gpu="host"):
        assert free_memory("fake", 2) == 0
    assert fake.freed == []


# -- gpu_context -------------------------------------------------------------------------------------


def test_the_device_is_selected_and_restored(fake: FakeFramework) -> None:
    with gpu_context(1):
        assert fake.current == 1
        with gpu_context(0):
            assert fake.current == 0
        assert fake.current == 1
    assert fake.current == 0
    assert fake.cached == [0, 0]
    with pytest.raises(KeyError), gpu_context(1):
        raise KeyError
    with gpu_context(None):
        assert fake.current == 0
    with pytest.raises(DeviceNotFoundError, match="gpu_id=7"), gpu_context(7):
        pass


def test_pyclesperanto_is_selected_and_restored() -> None:
    require("pyclesperanto")
    framework = arraybridge.framework("pyclesperanto")
    devices = framework.devices.available()
    before = framework.devices.default_device()
    for device in devices:
        with gpu_context(device.index):
            assert framework.devices.default_device() == device
            x = arraybridge.to_pyclesperanto(np.ones((2, 2), np.float32))
            assert framework.devices.device_of(x) == device
        assert framework.devices.default_device() == before


# -- sharing one GPU ---------------------------------------------------------------------------------


CHOSEN = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
SHARES = {"XLA_CLIENT_MEM_FRACTION": "0.25", "CUPY_GPU_MEMORY_LIMIT": "25%"}


@pytest.fixture
def set_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Act as if the function had been called; its settings are reset after the test."""
    for name, value in {**CHOSEN, **SHARES, "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("set_before")
def test_coexist_limits_preallocation() -> None:
    done = arraybridge.coexist(fraction=0.25)
    assert done == ({**CHOSEN, **SHARES}, ())
    assert done.environment.items() <= os.environ.items()
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ
    assert "XLA_PYTHON_CLIENT_PREALLOCATE=false" in str(done).splitlines()
    for bad in ("x", True, [0.5], np.True_, 1j):
        with pytest.raises(TypeError, match=r"fraction=.* must be a number"):
            arraybridge.coexist(bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="out of range"):
        arraybridge.coexist(1.5)


@pytest.mark.usefixtures("set_before")
def test_coexist_warns_if_called_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    require("jax").devices()
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    with pytest.warns(RuntimeWarning, match="too late for jax"):
        done = arraybridge.coexist()
    assert done.too_late == ("jax",)
    assert "too late for jax" in str(done)


def test_sharing_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = require("torch")
    require("cupy")
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    if not hardware.gpus():
        message = r"gpu:0 here: this machine has no CUDA GPU\. Skip share_gpu_memory\(\) on this machine\.$"
        with pytest.raises(DeviceNotFoundError, match=message):
            arraybridge.share_gpu_memory("torch")
    # Only here, because PyTorch's build for CUDA also reads the GPUs.
    monkeypatch.setattr(gpu_sharing, "hardware", SimpleNamespace(gpus=lambda: ("a GPU",)))
    with pytest.raises(DeviceNotFoundError, match="gpu:0") as caught:
        arraybridge.share_gpu_memory("torch")
    assert "Skip" not in str(caught.value)
