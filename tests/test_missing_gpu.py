"""``settings(missing_gpu="host")``: every call that names a GPU, with one warning per line."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arraybridge as ab
from arraybridge import (
    DeviceNotFoundError,
    MissingGpuWarning,
    Pipeline,
    device_map,
    prefetch,
    settings,
)
from tests import matrix_data as data
from tests.helpers import require

NOWHERE = 77
X = np.arange(8, dtype=np.float32).reshape(4, 2)


def same(x: Any) -> Any:
    return x


def three(x: Any, y: Any, *, z: Any) -> Any:
    assert all(str(ab.device_of(one)) == "cpu" for one in (x, y[0], z))
    return x + y[0] + z


@contextmanager
def on_the_host() -> Iterator[list[warnings.WarningMessage]]:
    with settings(missing_gpu="host"), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")  # once per line, as users have it
        yield seen


CALLS: dict[str, Callable[[], Any]] = {
    "convert_memory": lambda: ab.convert_memory(X, "torch", NOWHERE),
    "convert_tree": lambda: ab.convert_tree({"a": X, "b": [X, X]}, "torch", NOWHERE)["b"][1],
    "decorated": lambda: ab.torch(gpu_id=NOWHERE)(three)(X, [X], z=X) / 3,
    "decorated, device": lambda: ab.torch(device=f"gpu:{NOWHERE}", oom_recovery=True)(three)(X, [X], z=X) / 3,
    "decorated, no arrays": lambda: ab.torch(gpu_id=NOWHERE)(lambda: ab.to_torch(X))(),
    "prefetch": lambda: list(prefetch([X, {"x": X}, X], "torch", NOWHERE))[2],
    "prefetch, auto": lambda: list(prefetch([X, X], "torch", "auto"))[1],
    "Pipeline": lambda: Pipeline(ab.torch(gpu_id=NOWHERE)(same), microbatches=4)(X),
    "device_map, decorated": lambda: list(device_map(ab.torch(gpu_id=NOWHERE)(same), [X, X, X]))[2],
    "device_map": lambda: list(device_map(same, [X, X], [f"gpu:{NOWHERE}"]))[1],
    "stack_slices": lambda: ab.stack_slices(list(X[:, None]), "torch", NOWHERE)[:, 0],
}


@pytest.mark.parametrize("what", CALLS)
def test_a_call_warns_once_and_runs_on_the_host(what: str) -> None:
    torch = require("torch")
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    with pytest.raises(DeviceNotFoundError):
        CALLS[what]()
    for _ in range(2):
        with on_the_host() as seen:
            result = CALLS[what]()
        assert [w.category for w in seen] == [MissingGpuWarning]
        assert "gpu:" in str(seen[0].message)
        assert str(ab.device_of(result)) == "cpu"
        np.testing.assert_array_equal(ab.to_numpy(result), X)


def test_settings_override_the_environment_inside_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    require("torch")
    x = data.aligned_bytes(24).view(np.float32)
    with pytest.raises(DeviceNotFoundError) as caught:
        ab.convert_memory(x, "torch", NOWHERE)
    monkeypatch.setenv("ARRAYBRIDGE_MISSING_GPU", "host")
    with settings(missing_gpu="error"), pytest.raises(DeviceNotFoundError):
        ab.convert_memory(x, "torch", NOWHERE)
    with pytest.warns(MissingGpuWarning, match=f"gpu:{NOWHERE}") as seen:
        result = ab.convert_memory(x, "torch", NOWHERE)
    assert [Path(w.filename) for w in seen] == [Path(__file__)], "the warning points at the user's line"
    assert caught.value.reason in str(seen[0].message)
    assert data.address(result) == data.address(x)
    for odd in (np.ones(2), [1], "", 2):
        message = r"^missing_gpu=.* must be None, 'error' or 'host'\.$"
        with pytest.raises(ValueError, match=message), settings(missing_gpu=odd):  # type: ignore[arg-type]
            pass
    monkeypatch.delenv("ARRAYBRIDGE_MISSING_GPU")
    with pytest.raises(KeyError), settings(missing_gpu="host"):
        raise KeyError
    with pytest.raises(DeviceNotFoundError):
        ab.convert_memory(x, "torch", NOWHERE)


def test_threads_of_a_pool_need_the_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """`settings` applies to the current thread. The message names the variable for all threads."""
    require("torch")
    convert = ab.torch(gpu_id=NOWHERE)(same)
    with on_the_host() as seen, ThreadPoolExecutor(1) as pool:
        with pytest.raises(DeviceNotFoundError, match="ARRAYBRIDGE_MISSING_GPU=host for all threads"):
            pool.submit(convert, X).result()
        monkeypatch.setenv("ARRAYBRIDGE_MISSING_GPU", "host")
        assert str(ab.device_of(pool.submit(convert, X).result())) == "cpu"
    assert [w.category for w in seen] == [MissingGpuWarning]


def test_a_warning_names_the_line_of_the_user() -> None:
    require("torch")
    far = ab.torch(gpu_id=NOWHERE)(same)
    here = sys._getframe().f_lineno
    with on_the_host() as seen:
        with ab.use_device(f"gpu:{NOWHERE}"):  # 2 lines below
            pass
        with ExitStack() as stack:
            stack.enter_context(ab.use_device(f"gpu:{NOWHERE}"))  # 5
        list(device_map(far, [X, X], ["cpu"]))  # 6
        list(prefetch([X], "torch", NOWHERE))  # 7
        Pipeline(far, microbatches=2)(X)  # 8
        list(device_map(lambda x: far(x), [X], ["cpu"]))  # 9
    assert [(w.filename, w.lineno - here) for w in seen] == [(__file__, n) for n in (2, 5, 6, 7, 8, 9)]
