"""MLX and PaddlePaddle with NumPy, PyTorch and JAX: bit-equal values of every dtype, and special cases."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import ArrayNotSupportedError, convert_memory, explain, to_numpy
from arraybridge.testing.conformance import DTYPES, LAYOUTS, sample
from tests.helpers import require

# According to their documentation. Paddle's uint16 is its name for bfloat16.
LACKS = {"mlx": {"complex128", "float8_e4m3fn", "float8_e5m2"}, "paddle": {"uint16"}}


def needed(name: str) -> Any:
    """Import a framework, or skip."""
    require(name)
    return importlib.import_module({"mlx": "mlx.core"}.get(name, name))


def bits(x: Any) -> bytes:
    """Return the bytes of an array of any framework in native byte order, read through NumPy."""
    host: np.ndarray[Any, Any] = to_numpy(x, copy=True)
    return host.astype(host.dtype.newbyteorder("="), copy=False).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("other", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("name", LACKS)
def test_every_pair(name: str, other: str, dtype: str) -> None:
    needed(name)
    needed(other)
    for layout in LAYOUTS:
        if layout == "big-endian" and dtype.startswith("float8"):
            continue
        wanted = sample(dtype, layout)
        source = convert_memory(wanted, other)
        if dtype in LACKS[name]:
            with pytest.raises(arraybridge.DtypeNotSupportedError, match="dtype="):
                convert_memory(source, name)
            continue
        route = explain(source, name)
        there = convert_memory(source, name)
        back = convert_memory(there, other)
        assert [arraybridge.detect_memory_type(x) for x in (there, back)] == [name, other]
        assert tuple(there.shape) == wanted.shape
        assert bits(back) == bits(wanted), (layout, str(route))
        assert route.shares_memory is (route.copies == 0)


# -- MLX ---------------------------------------------------------------------------------------------------


def test_mlx_evaluates_lazy_arrays_and_numpy_views_are_read_only() -> None:
    mx = needed("mlx")
    assert to_numpy(mx.arange(4) * 2).tolist() == [0, 2, 4, 6]
    x = mx.array([1.0, 2.0])
    assert explain(x, "numpy").shares_memory
    view = to_numpy(x)
    assert not view.flags.writeable
    x[0] = 5.0  # allocates other memory for the array
    mx.eval(x)
    del x
    assert view.tolist() == [1.0, 2.0]


def test_mlx_arrays_of_other_threads_and_traced_values_raise() -> None:
    mx = needed("mlx")
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(lambda: mx.arange(3) + 1).result()
    with pytest.raises(ArrayNotSupportedError, match=r"Call mx\.eval\(x\) in that thread"):
        to_numpy(made)

    def look(x: Any) -> Any:
        with pytest.raises(ArrayNotSupportedError, match="traced"):
            to_numpy(x)
        return x

    mx.compile(look)(mx.array([1.0]))


# -- PaddlePaddle ------------------------------------------------------------------------------------------


def test_paddle_shares_both_ways() -> None:
    paddle = needed("paddle")
    for source in (np.arange(6.0), np.arange(3.0)[::-1][:1]):  # reversed along a single element
        assert explain(source, "paddle").shares_memory
        tensor = convert_memory(source, "paddle", copy=False)
        source[0] = 9.0
        assert bits(tensor) == source.tobytes()
    assert to_numpy(paddle.ones([3])).flags.writeable
    assert explain(tensor, "torch").shares_memory


def test_paddle_gradients_sparse_tensors_and_oom_raise() -> None:
    paddle = needed("paddle")
    x = paddle.to_tensor([1.0, 2.0], stop_gradient=False)
    with pytest.raises(arraybridge.GradientError, match="grad='detach'"):
        to_numpy(x)
    assert to_numpy(x, grad="detach").tolist() == [1.0, 2.0]
    with pytest.raises(ArrayNotSupportedError, match="to_dense"):
        to_numpy(paddle.sparse.sparse_coo_tensor([[0, 1]], [1.0, 2.0], [3]))
    with pytest.raises(MemoryError) as caught:
        paddle.zeros([1 << 45])
    assert arraybridge.is_oom_error(caught.value)


def test_paddle_imports_gpu_memory_with_its_gpu_selected() -> None:
    needed("paddle")
    log: list[str] = []

    @contextmanager
    def select(device: arraybridge.Device) -> Iterator[None]:
        log.append(f"selects {device}")
        yield
        log.append("leaves it")

    def block_until_ready(x: Any) -> None:
        log.append("settles")

    def export(x: Any, device: arraybridge.Device) -> Any:
        log.append("lends")
        return x

    exporter: Any = SimpleNamespace(
        devices=SimpleNamespace(select=select),
        interchange=SimpleNamespace(block_until_ready=block_until_ready, export=export),
    )
    x = arraybridge.aligned((3,), "float32")
    x[...] = 1
    shared = arraybridge.framework("paddle").interchange.import_from(
        x, exporter, arraybridge.Device("gpu", 1)
    )
    x[0] = 7
    assert shared.tolist() == [7, 1, 1]
    assert log == ["selects gpu:1", "settles", "lends", "leaves it"]
