"""The device on which a function runs, as every module determines it, also through wrappers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import Pipeline, device_map
from arraybridge.parallel.function_devices import placement_text
from tests.helpers import require


@arraybridge.jax(device="cpu:1")
def shifted(x: Any, by: float = 1.0) -> Any:
    return x + by, str([d.id for d in x.devices()])


class Stage:
    @arraybridge.jax(device="cpu:1")
    def __call__(self, x: Any) -> Any:
        return shifted.__wrapped__(x)

    @arraybridge.jax(device="cpu:1")
    def method(self, x: Any) -> Any:
        return shifted.__wrapped__(x)


def logged(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper that hides the function's attributes, except `__wrapped__`."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    wrapper.__wrapped__ = fn  # type: ignore[attr-defined]
    return wrapper


AROUND = {
    "itself": shifted,
    "partial of a partial": functools.partial(functools.partial(shifted), by=1.0),
    "bound method": Stage().method,
    "object": Stage(),
    "functools.wraps": functools.wraps(shifted)(lambda *args: shifted(*args)),
    "a wrapper": logged(shifted),
}


@pytest.mark.parametrize("fn", AROUND.values(), ids=AROUND)
def test_all_modules_agree_on_the_device_of_a_function(fn: Any) -> None:
    require("jax")
    x = np.ones(2, np.float32)
    assert placement_text(fn) == "jax on cpu:1"
    ((result, devices),) = device_map(fn, [x])
    assert arraybridge.device_of(result) == "cpu:1"
    assert devices == "[1]"
    pipeline = Pipeline(fn)
    list(pipeline.map([x]))
    assert pipeline.report().stages[0].device == "jax on cpu:1"
    with pytest.raises(arraybridge.DeviceNotFoundError, match="jax has no device cpu:77"):
        device_map(fn, [x], devices=["cpu:77"])
