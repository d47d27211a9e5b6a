"""Devices, maps and pipelines on a real card."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import Pipeline, compare, devices, use_device
from tests.helpers import needs_kernels_of, require

pytestmark = pytest.mark.gpu

CARD = ("cupy", "torch", "jax")


def decorated(name: str, **options: Any) -> Any:
    return arraybridge.framework(name).decorator(**options)


def test_the_card_has_a_name_an_identity_and_memory() -> None:
    require("torch")
    card = next(d for d in devices("torch") if d == "gpu:0")
    assert card.name
    assert card.identity.startswith(("GPU-", "MIG-"))
    assert card.pci.count(":") == 2
    assert card.capability is not None
    assert card.total > 0
    assert card.free is None or 0 < card.free <= card.total


@pytest.mark.parametrize("name", CARD)
def test_one_number_is_one_card(name: str) -> None:
    require(name)
    require("torch")
    arraybridge.convert_memory(np.zeros(2, np.float32), name, 0)  # opened, so that it can tell
    found = {str(d): d for d in devices(name)}
    assert found["gpu:0"].identity == {str(d): d for d in devices("torch")}["gpu:0"].identity


def test_asking_opens_no_card() -> None:
    from tests.helpers import run_script

    done = run_script("devices_open_nothing.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "0"


@pytest.mark.parametrize("name", CARD)
def test_to_gpu_and_namespaces(name: str) -> None:
    require(name)
    with use_device("gpu"):
        x = arraybridge.convert_memory(np.arange(6, dtype=np.float32), name, 0)
        assert arraybridge.to_gpu(x) is x
        xp = arraybridge.array_namespace(x)
        assert float(xp.sum(x)) == 15.0
        assert arraybridge.device_of(arraybridge.array_namespace().asarray([1.0, 2.0])).kind in ("gpu", "cpu")


def test_a_pipeline_over_several_frameworks() -> None:
    for name in CARD:
        require(name)
    stages = [decorated(name, gpu_id=0)(lambda x: x * 2 + 1) for name in CARD]
    x = np.arange(4096, dtype=np.float32).reshape(64, 64)
    expected = x
    for _ in CARD:
        expected = expected * 2 + 1
    for _ in range(10):
        result = Pipeline(*stages, microbatches=16)(x)
        np.testing.assert_array_equal(arraybridge.to_numpy(result), expected)


def test_compare_on_the_card() -> None:
    needs_kernels_of("cuBLAS")
    torch = require("torch")
    result = compare(torch.matmul, torch.ones(1024, 1024), torch.ones(1024, 1024), runs=10)
    assert result.gpu is not None
    assert result.speedup is not None
    assert result.speedup > 1
