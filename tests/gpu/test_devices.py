"""Devices, maps and pipelines on a real card."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import Pipeline, compare, device_map, devices, use_device
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


def test_questions_in_one_line() -> None:
    assert arraybridge.gpu_available()
    assert arraybridge.least_used_gpu() in range(len(arraybridge.device_info()["names"]))
    assert arraybridge.device_info()["backend"] == "cuda"
    assert str(arraybridge.get_device()) == "gpu:0"


@pytest.mark.parametrize("name", CARD)
def test_to_gpu_and_namespaces(name: str) -> None:
    require(name)
    with use_device("gpu"):
        x = arraybridge.convert_memory(np.arange(6, dtype=np.float32), name, 0)
        assert arraybridge.to_gpu(x) is x
        xp = arraybridge.array_namespace(x)
        assert float(xp.sum(x)) == 15.0
        assert arraybridge.device_of(arraybridge.array_namespace().asarray([1.0, 2.0])).kind in ("gpu", "cpu")


@pytest.mark.parametrize("name", CARD)
def test_a_pipeline_on_one_card(name: str) -> None:
    needs_kernels_of("cuBLAS")
    require(name)

    @decorated(name, gpu_id=0)
    def multiply(x: Any) -> Any:
        for _ in range(20):
            x = x @ x / 64
        return x

    @decorated(name, gpu_id=0)
    def shift(x: Any) -> Any:
        return x + 1

    @decorated(name, gpu_id=0, output_type="numpy")
    def collect(x: Any) -> Any:
        return x * 2

    x = np.random.default_rng(0).random((24, 64, 64), np.float32)
    pipeline = Pipeline(multiply, shift, collect, microbatches=12)
    expected = np.concatenate([collect(shift(multiply(x[i : i + 2]))) for i in range(0, 24, 2)])
    for _ in range(5):
        np.testing.assert_array_equal(pipeline(x), expected)
    # Results that stay on the card are safe to use after the threads have ended.
    on_card = Pipeline(multiply, shift, microbatches=12)
    for _ in range(5):
        result = on_card(arraybridge.convert_memory(x, name, 0))
        np.testing.assert_array_equal(arraybridge.to_numpy(result) * 2, expected)
    for i, part in enumerate(on_card.map(x[i : i + 2] for i in range(0, 24, 2))):
        np.testing.assert_array_equal(arraybridge.to_numpy(part) * 2, expected[2 * i : 2 * i + 2])


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


@pytest.mark.parametrize("name", CARD)
def test_device_map_on_the_card(name: str) -> None:
    require(name)

    @decorated(name)
    def square(x: Any) -> Any:
        return x * x

    items = [np.full((64, 64), i, np.float32) for i in range(40)]
    for per_device in (1, 4):
        results = list(device_map(square, items, ["gpu:0"], per_device=per_device))
        assert {str(arraybridge.device_of(r)) for r in results} == {"gpu:0"}
        for item, result in zip(items, results, strict=True):
            np.testing.assert_array_equal(arraybridge.to_numpy(result), item * item)
    assert arraybridge.device_of(next(device_map(square, items))).kind == "gpu"


def test_compare_over_sizes_on_the_card() -> None:
    seen = []

    def doubled(x: Any) -> Any:
        seen.append((arraybridge.device_of(x), x.shape))
        return x * 2

    result = compare(doubled, sizes=[100, 10_000], runs=3)
    assert [row.size for row in result.rows] == [100, 10_000]
    assert all(row.comparison.gpu is not None for row in result.rows)
    assert {(str(device), shape) for device, shape in seen} == {
        (device, (size,)) for device in ("cpu", "gpu:0") for size in (100, 10_000)
    }
    assert "speed-up" in str(result)


def test_compare_on_the_card() -> None:
    needs_kernels_of("cuBLAS")
    torch = require("torch")
    result = compare(torch.matmul, torch.ones(1024, 1024), torch.ones(1024, 1024), runs=10)
    assert result.gpu is not None
    assert result.speedup is not None
    assert result.speedup > 1
