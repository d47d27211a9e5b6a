"""Giving caches back, selecting a device everywhere, and sharing one card, as far as it goes without one."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import DeviceNotFoundError, free_memory, gpu_context
from arraybridge.memory import cleanup
from arraybridge.types import Device
from tests.helpers import require, run_python
from tests.memory.fake import FakeFramework

SINGLE = {
    "torch": arraybridge.cleanup_torch_gpu,
    "cupy": arraybridge.cleanup_cupy_gpu,
    "jax": arraybridge.cleanup_jax_gpu,
    "tensorflow": arraybridge.cleanup_tensorflow_gpu,
    "pyclesperanto": arraybridge.cleanup_pyclesperanto_gpu,
}


def test_bytes_given_back_are_returned(fake: FakeFramework) -> None:
    assert free_memory("fake", 1) == 30
    assert free_memory("fake") == 50
    assert free_memory("fake") == 0
    assert fake.freed == [(Device("gpu", 1), False), (None, False), (None, False)]


@pytest.mark.parametrize("name", SINGLE)
def test_every_framework_answers_here(name: str) -> None:
    require(name)
    assert SINGLE[name]() >= 0
    assert free_memory(name, compiled=True) >= 0


def test_jax_compiles_anew_after_its_programs_went() -> None:
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


@pytest.mark.parametrize("bad", [-1, True, 0.0, "auto"])
def test_bad_numbers(bad: Any) -> None:
    with pytest.raises(ValueError, match="gpu_id"):
        free_memory(gpu_id=bad)
    with pytest.raises(ValueError, match=r"gpu_id|gpu_context"), gpu_context(bad):
        pass


def test_a_card_that_is_not_there(fake: FakeFramework) -> None:
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


def test_a_context_of_no_card(fake: FakeFramework) -> None:
    with pytest.raises(DeviceNotFoundError, match="accelerator 7"), gpu_context(7):
        pass
    assert fake.current == 0
    with arraybridge.settings(missing_gpu="host"), gpu_context(7):
        assert fake.current == 0
    with gpu_context(None):
        assert fake.current == 0


def test_pyclesperanto_is_selected_and_restored() -> None:
    require("pyclesperanto")
    framework = arraybridge.framework("pyclesperanto")
    devices = framework.devices()
    before = framework.default_device()
    for device in devices:
        with gpu_context(device.index):
            assert framework.default_device() == device
            x = arraybridge.to_pyclesperanto(np.ones((2, 2), np.float32))
            assert framework.device_of(x) == device
        assert framework.default_device() == before


# -- sharing one card --------------------------------------------------------------------------------


@pytest.fixture
def no_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What coexist() sets is gone after the test."""
    for name in ("CUPY_GPU_MEMORY_LIMIT", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(name, "")


SEGMENTS, SHARE, SIZE = "expandable_segments:True", "per_process_memory_fraction:0.5", "max_split_size_mb:64"
NEW, OLD = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"


@pytest.mark.parametrize(
    ("version", "before", "fraction", "after"),
    [
        ("2.13.0", {}, None, {NEW: SEGMENTS}),
        ("2.12.1", {}, None, {OLD: SEGMENTS}),
        ("2.13.0+cu130", {}, 0.5, {NEW: f"{SEGMENTS},{SHARE}"}),
        ("2.12.1", {}, 0.5, {OLD: SEGMENTS}),
        # What the user chose stays, and the user's variable.
        ("2.13.0", {OLD: SIZE}, 0.5, {OLD: f"{SIZE},{SHARE}"}),
        ("2.13.0", {NEW: "per_process_memory_fraction:0.9"}, 0.5, {NEW: SHARE}),
        ("", {}, 0.5, {}),
    ],
)
@pytest.mark.usefixtures("no_limits")
def test_coexist_speaks_to_the_allocator_of_torch(
    version: str, before: dict[str, str], fraction: float | None, after: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(name: str) -> str:
        if not version:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", installed)
    monkeypatch.setattr(sys, "platform", "linux")
    for name, words in before.items():
        monkeypatch.setenv(name, words)
    chosen = cleanup.coexistence(fraction)
    assert {name: words for name, words in chosen.items() if name.startswith("PYTORCH")} == after


@pytest.mark.usefixtures("no_limits")
def test_coexist(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XLA_PYTHON_CLIENT_PREALLOCATE", "TF_FORCE_GPU_ALLOW_GROWTH"):
        monkeypatch.setenv(name, {"X": "false", "T": "true"}[name[0]])
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.9")
    done = arraybridge.coexist(fraction=0.25)
    torch_words = {name: words for name, words in done.environment.items() if name.startswith("PYTORCH")}
    assert {name: words for name, words in done.environment.items() if name not in torch_words} == {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        "XLA_CLIENT_MEM_FRACTION": "0.25",
        "CUPY_GPU_MEMORY_LIMIT": "25%",
    }
    assert os.environ["XLA_CLIENT_MEM_FRACTION"] == "0.25"
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ
    assert "XLA_PYTHON_CLIENT_PREALLOCATE=false" in str(done).splitlines()


@pytest.mark.usefixtures("no_limits")
def test_coexist_says_when_it_is_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    jax = require("jax")
    jax.devices()
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    with pytest.warns(RuntimeWarning, match="too late for jax"):
        done = arraybridge.coexist()
    assert done.too_late == ("jax",)
    assert "too late for jax" in str(done)


def test_sharing_needs_a_card() -> None:
    torch = require("torch")
    require("cupy")
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(DeviceNotFoundError, match="gpu:0"):
        arraybridge.share_gpu_memory("torch")


def test_a_framework_that_does_not_work_here_is_left_out() -> None:
    script = """
import sys, types

class Broken(types.ModuleType):
    asked = 0
    def __getattr__(self, name):
        Broken.asked += 1
        raise AttributeError(name)

sys.modules["torch"] = Broken("torch")
import arraybridge
from arraybridge.frameworks import registry

print([one.name for one in registry.loaded()], Broken.asked > 0)
before = Broken.asked
print(arraybridge.free_memory(), Broken.asked == before)
"""
    done = run_python("-c", script)
    assert done.stdout.splitlines() == ["['numpy'] True", "0 True"], done.stderr


@pytest.mark.parametrize("bad", ["x", True, [0.5], np.True_, 1j])
def test_coexist_takes_a_number(bad: Any) -> None:
    with pytest.raises(TypeError, match=r"fraction=.* must be a number"):
        arraybridge.coexist(bad)
