"""MLX and PaddlePaddle with NumPy, torch and JAX: every pair and dtype, bit for bit; and what is theirs."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge.testing import sample
from arraybridge.testing.promises import DTYPES, LAYOUTS
from tests.helpers import require

MODULES = {"mlx": "mlx.core"}
OTHERS = ("numpy", "torch", "jax")
# By their documentation. Paddle's uint16 is its name for bfloat16.
HELD = {
    "mlx": {*DTYPES} - {"complex128", "float8_e4m3fn", "float8_e5m2"},
    "paddle": {*DTYPES} - {"uint16"},
}


def needed(name: str) -> Any:
    """Import a framework, or skip."""
    require(name)
    return importlib.import_module(MODULES.get(name, name))


def bits(x: Any) -> bytes:
    """The values of an array of any framework, read by way of NumPy."""
    host: np.ndarray[Any, Any] = arraybridge.to_numpy(x, copy=True)
    return host.astype(host.dtype.newbyteorder("="), copy=False).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("name", ["mlx", "paddle"])
def test_every_pair(name: str, other: str, dtype: str) -> None:
    needed(name)
    needed(other)
    for layout in LAYOUTS:
        if layout == "big-endian" and dtype.startswith("float8"):
            continue
        want = sample(dtype, layout)
        source = arraybridge.convert_memory(want, other)
        if dtype not in HELD[name]:
            with pytest.raises(arraybridge.DtypeNotSupportedError, match="dtype="):
                arraybridge.convert_memory(source, name)
            continue
        said = arraybridge.explain(source, name)
        there = arraybridge.convert_memory(source, name)
        assert arraybridge.detect_memory_type(there) == name
        assert tuple(there.shape) == want.shape
        back = arraybridge.convert_memory(there, other)
        assert arraybridge.detect_memory_type(back) == other
        expected = want.astype(want.dtype.newbyteorder("="), copy=False).tobytes()
        assert bits(back) == expected, (layout, str(said))
        assert said.shares_memory is (said.copies == 0)


def test_mlx_settles_what_is_lazy() -> None:
    mx = needed("mlx")
    lazy = mx.arange(4) * 2
    assert arraybridge.to_numpy(lazy).tolist() == [0, 2, 4, 6]


def test_mlx_numpy_sees_its_memory_and_cannot_write_to_it() -> None:
    mx = needed("mlx")
    x = mx.array([1.0, 2.0])
    assert arraybridge.explain(x, "numpy").shares_memory
    view = arraybridge.to_numpy(x)
    assert not view.flags.writeable
    x[0] = 5.0  # gives the array other memory
    mx.eval(x)
    del x
    assert view.tolist() == [1.0, 2.0]


def test_mlx_of_another_thread_is_refused_with_advice() -> None:
    mx = needed("mlx")
    made: list[Any] = []

    def work() -> None:
        made.append(mx.arange(3) + 1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    with pytest.raises(arraybridge.ArrayNotSupportedError, match=r"mx\.eval\(x\) there"):
        arraybridge.to_numpy(made[0])


def test_mlx_keeps_float64_and_complex64() -> None:
    needed("mlx")
    assert str(arraybridge.to_mlx(np.array([1e300])).dtype) == "mlx.core.float64"
    with pytest.raises(arraybridge.DtypeNotSupportedError):
        arraybridge.to_mlx(np.array([1j]))
    assert arraybridge.to_mlx(np.array([1j]), dtype="complex64").item() == 1j


def test_mlx_traced_values_are_refused() -> None:
    mx = needed("mlx")

    def look(x: Any) -> Any:
        with pytest.raises(arraybridge.ArrayNotSupportedError, match="traced"):
            arraybridge.to_numpy(x)
        return x

    mx.compile(look)(mx.array([1.0]))


def test_paddle_shares_both_ways() -> None:
    paddle = needed("paddle")
    source = np.arange(6.0)
    tensor = arraybridge.to_paddle(source)
    source[0] = 9.0
    assert float(tensor[0]) == 9.0
    view = arraybridge.to_numpy(paddle.ones([3]))
    assert view.flags.writeable
    assert arraybridge.explain(tensor, "torch").shares_memory


class OnCards(arraybridge.Framework):
    """Lends memory of the host as if it were that of a card, and says what it was asked for."""

    name = "on cards"

    def __init__(self) -> None:
        self.log: list[str] = []

    def owns(self, x: Any) -> bool:
        return isinstance(x, np.ndarray)

    @contextmanager
    def selected(self, device: arraybridge.Device) -> Iterator[None]:
        self.log.append(f"selects {device}")
        yield
        self.log.append("leaves it")

    def settle(self, x: Any) -> None:
        self.log.append("settles")

    def exported(self, x: Any, device: arraybridge.Device) -> Any:
        self.log.append("lends")
        return x


def test_paddle_takes_memory_of_a_card_while_its_owner_has_selected_that_card() -> None:
    needed("paddle")
    lender, x = OnCards(), arraybridge.aligned((3,), "float32")
    x[...] = 1
    shared = arraybridge.framework("paddle").adopt(x, lender, arraybridge.Device("gpu", 1))
    x[0] = 7
    assert shared.tolist() == [7, 1, 1]
    assert lender.log == ["selects gpu:1", "settles", "lends", "leaves it"]


def test_paddle_gradients_are_refused_or_detached() -> None:
    paddle = needed("paddle")
    x = paddle.to_tensor([1.0, 2.0], stop_gradient=False)
    with pytest.raises(arraybridge.GradientError, match="grad='detach'"):
        arraybridge.to_numpy(x)
    assert arraybridge.to_numpy(x, grad="detach").tolist() == [1.0, 2.0]


def test_paddle_oom() -> None:
    paddle = needed("paddle")
    with pytest.raises(MemoryError) as caught:
        paddle.zeros([1 << 45])
    assert arraybridge.is_oom_error(caught.value)


def test_paddle_sparse_is_refused() -> None:
    paddle = needed("paddle")
    with pytest.raises(arraybridge.ArrayNotSupportedError, match="to_dense"):
        arraybridge.to_numpy(paddle.sparse.sparse_coo_tensor([[0, 1]], [1.0, 2.0], [3]))


@pytest.mark.parametrize("name", ["mlx", "paddle"])
def test_decorators(name: str) -> None:
    needed(name)
    decorator = getattr(arraybridge, name)
    assert decorator is arraybridge.framework(name).decorator

    @decorator(output_type="input", oom_recovery="split")
    def double(x: Any) -> Any:
        assert arraybridge.detect_memory_type(x) == name
        return x * 2

    assert double(np.arange(4.0)).tolist() == [0.0, 2.0, 4.0, 6.0]
    doubled = arraybridge.device_map(double, [np.ones(2), np.zeros(2)], devices=["cpu"])
    assert [x.tolist() for x in doubled] == [[2, 2], [0, 0]]


def test_paddle_shares_what_is_reversed_along_a_single_element() -> None:
    needed("paddle")
    x = np.arange(3.0)[2:][::-1]
    assert arraybridge.explain(x, "paddle").shares_memory
    shared = arraybridge.convert_memory(x, "paddle", copy=False)
    x[0] = 7
    assert bits(shared) == x.tobytes()
