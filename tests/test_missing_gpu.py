"""``settings(missing_gpu="host")``: it reaches every call that names a GPU, and each warns once."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import (
    MissingGpuWarning,
    Pipeline,
    device_map,
    prefetch,
    settings,
)
from tests.helpers import require

NOWHERE = 77
X = np.arange(8, dtype=np.float32).reshape(4, 2)


def three(x: Any, y: Any, *, z: Any) -> Any:
    assert all(str(arraybridge.device_of(one)) == "cpu" for one in (x, y[0], z))
    return x + y[0] + z


def same(x: Any) -> Any:
    return x


@pytest.mark.parametrize(
    "call",
    [
        lambda: arraybridge.convert_tree({"a": X, "b": [X, X]}, "torch", NOWHERE)["b"][1],
        lambda: arraybridge.convert_tree([X, X], "torch", device=f"cuda:{NOWHERE}")[1],
        lambda: arraybridge.torch(gpu_id=NOWHERE)(three)(X, [X], z=X) / 3,
        lambda: arraybridge.torch(gpu_id="auto")(three)(X, [X], z=X) / 3,
        lambda: arraybridge.torch(device=f"gpu:{NOWHERE}", oom_recovery=True)(three)(X, [X], z=X) / 3,
        lambda: list(prefetch([X, {"x": X}, X], "torch", NOWHERE))[2],
        lambda: list(prefetch([X, X], "torch", "auto"))[1],
        lambda: list(prefetch([X, X], "torch", device=f"gpu:{NOWHERE}"))[1],
        lambda: Pipeline(arraybridge.torch(gpu_id=NOWHERE)(same), microbatches=4)(X),
        lambda: list(device_map(arraybridge.torch(gpu_id=NOWHERE)(same), [X, X, X]))[2],
        lambda: list(device_map(same, [X, X], [f"gpu:{NOWHERE}"]))[1],
        lambda: list(device_map(arraybridge.torch(same), [X, X], [f"gpu:{NOWHERE}"]))[1],
        lambda: arraybridge.torch(gpu_id=NOWHERE)(lambda: arraybridge.to_torch(X))(),
        lambda: arraybridge.stack_slices(list(X[:, None]), "torch", NOWHERE)[:, 0],
    ],
    ids=[
        *("convert_tree", "convert_tree-device", "decorated", "decorated-auto", "decorated-device"),
        *("prefetch", "prefetch-auto", "prefetch-device", "Pipeline", "device_map-decorated"),
        *("device_map-plain", "device_map-framework", "no-arrays", "stack_slices"),
    ],
)
def test_a_call_warns_once_and_runs_on_the_host(call: Callable[[], Any]) -> None:
    torch = require("torch")
    if torch.cuda.is_available():
        pytest.skip("the freest card is there")
    for _ in range(2):
        with settings(missing_gpu="host"), warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            result = call()
        assert [w.category for w in seen] == [MissingGpuWarning]
        assert "gpu:" in str(seen[0].message)
        assert str(arraybridge.device_of(result)) == "cpu"
        np.testing.assert_array_equal(arraybridge.to_numpy(result), X)
    with pytest.raises(arraybridge.DeviceNotFoundError):
        call()


@pytest.mark.parametrize(
    ("devices", "fn"),
    [
        ([f"gpu:{NOWHERE}", f"gpu:{NOWHERE + 1}"], same),
        ([NOWHERE, NOWHERE + 1], same),
        ([NOWHERE, NOWHERE + 1], arraybridge.torch(same)),
        ([f"gpu:{NOWHERE}", f"gpu:{NOWHERE + 1}", "cpu"], arraybridge.torch(same)),
        (["cpu", f"gpu:{NOWHERE}"], same),
    ],
)
def test_the_host_stands_once_for_several_cards(devices: list[Any], fn: Callable[[Any], Any]) -> None:
    require("torch")
    ran: list[str] = []

    def tell() -> str:
        ran.append(threading.current_thread().name)
        return str(arraybridge.get_device())

    def run(device: str, x: Any) -> tuple[str, Any]:
        return device, fn(x)

    with settings(missing_gpu="host"), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        plain = fn is same
        results = list(device_map(run if plain else fn, [X, X], devices, setup=tell if plain else None))
    assert [w.category for w in seen] == [MissingGpuWarning]
    assert f"gpu:{NOWHERE} is missing" in str(seen[0].message)
    if plain:
        assert len(ran) == 1
        assert [device for device, _ in results] == ["cpu", "cpu"]
    else:
        for result in results:
            np.testing.assert_array_equal(arraybridge.to_numpy(result), X)


def test_a_warning_names_the_line_of_the_user() -> None:
    require("torch")
    far = arraybridge.torch(gpu_id=NOWHERE)(same)
    here = sys._getframe().f_code.co_firstlineno
    with settings(missing_gpu="host"), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with arraybridge.use_device(f"gpu:{NOWHERE}"):  # 5 lines below the head of the test
            pass
        with ExitStack() as stack:
            stack.enter_context(arraybridge.use_device(f"gpu:{NOWHERE}"))  # 8
        list(device_map(far, [X, X], ["cpu"]))  # 9
        list(prefetch([X], "torch", NOWHERE))  # 10
        Pipeline(far, microbatches=2)(X)  # 11
        list(device_map(lambda x: far(x), [X], ["cpu"]))  # 12
    assert [(w.filename, w.lineno - here) for w in seen] == [(__file__, n) for n in (6, 9, 10, 11, 12, 13)]


@pytest.mark.parametrize("odd", [np.ones(2), np.ones(1), [1], object(), "", "maybe", 2, 0.5])
@pytest.mark.parametrize("option", ["missing_gpu", "annotate"])
def test_what_an_option_takes_is_said(option: str, odd: Any) -> None:
    with pytest.raises(ValueError, match=f"^{option} is .*; it must be "), settings(**{option: odd}):
        pass
