"""Decorated coroutine functions, whose options apply until the coroutine returns."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge.decorators.coroutines import await_in_steps
from tests.helpers import jax_with, require


def run_all(*coroutines: Any) -> list[Any]:
    """Run coroutines in turn, each up to its next ``await``, and return their results."""

    async def gather() -> list[Any]:
        return await asyncio.gather(*coroutines)

    return asyncio.run(gather())


def test_a_device_applies_to_each_step_of_its_coroutine_only() -> None:
    jax = jax_with(3)

    async def device_after_each_step() -> list[int]:
        found = []
        for _ in range(3):
            (device,) = jax.numpy.ones(1).devices()
            found.append(device.id)
            await asyncio.sleep(0)
        return found

    decorated = [arraybridge.jax(device=f"cpu:{i}")(device_after_each_step) for i in (1, 2)]
    found = run_all(decorated[0](), device_after_each_step(), decorated[1](), device_after_each_step())
    assert found == [[1] * 3, [0] * 3, [2] * 3, [0] * 3]


def test_a_tensorflow_device_applies_to_each_step_of_its_coroutine_only() -> None:
    tf = require("tensorflow")
    if len(tf.config.list_logical_devices("CPU")) < 2:
        pytest.skip("TensorFlow has started with one CPU device")

    async def devices() -> list[str]:
        first = tf.constant([1.0]).device[-5:]
        await asyncio.sleep(0)
        return [first, tf.constant([1.0]).device[-5:]]

    assert run_all(arraybridge.tensorflow(device="cpu:1")(devices)(), devices()) == [
        ["CPU:1", "CPU:1"],
        ["CPU:0", "CPU:0"],
    ]


def test_x64_applies_to_each_step_of_its_coroutine_only() -> None:
    jax = require("jax")

    async def dtypes(x: Any) -> list[str]:
        first = str((jax.numpy.zeros(2) + x.sum()).dtype)
        await asyncio.sleep(0)
        return [first, str(jax.numpy.arange(2.0).dtype)]

    x = np.ones(2, np.float32)
    on, off, unset = (arraybridge.jax(**options)(dtypes) for options in ({"x64": True}, {"x64": False}, {}))
    assert run_all(on(x), off(x), on(x), unset(x)) == [["float64"] * 2, ["float32"] * 2] * 2
    assert not jax.config.jax_enable_x64


def test_values_and_exceptions_reach_the_coroutine() -> None:
    @arraybridge.jax(x64=True)
    async def wait_for(future: Any) -> str:
        try:
            return str(await future)
        except KeyError:
            return "KeyError"

    require("jax")

    async def main() -> list[Any]:
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in range(2)]
        tasks = [asyncio.ensure_future(wait_for(future)) for future in futures]
        await asyncio.sleep(0)
        futures[0].set_result("a value")
        futures[1].set_exception(KeyError())
        return await asyncio.gather(*tasks)

    assert asyncio.run(main()) == ["a value", "KeyError"]


@pytest.mark.parametrize("end", ["cancel", "close"])
def test_options_apply_while_a_coroutine_is_cancelled_or_closed(end: str) -> None:
    jax = require("jax")
    seen = []

    @arraybridge.jax(x64=True)
    async def wait() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            seen.append(str(jax.numpy.arange(2.0).dtype))

    async def cancel() -> None:
        task = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    if end == "cancel":
        asyncio.run(cancel())
    else:
        coroutine = wait()

        async def start() -> None:
            coroutine.send(None)

        asyncio.run(start())
        coroutine.close()
    assert seen == ["float64"]
    assert not jax.config.jax_enable_x64


def test_errors_of_a_coroutine_propagate() -> None:
    require("jax")

    @arraybridge.jax(x64=True, output_type="numpy")
    async def fail(x: Any) -> Any:
        await asyncio.sleep(0)
        raise StopAsyncIteration(str(x.dtype))

    with pytest.raises(StopAsyncIteration, match="float64"):
        asyncio.run(fail(np.ones(2)))


def test_any_awaitable_can_run_in_steps() -> None:
    steps = []

    def run_step(step: Any) -> Any:
        steps.append("begin")
        try:
            return step()
        finally:
            steps.append("end")

    async def main() -> Any:
        loop = asyncio.get_running_loop()

        def make_future(value: int) -> asyncio.Future[int]:
            future: asyncio.Future[int] = loop.create_future()
            loop.call_soon(future.set_result, value)
            return future

        return await await_in_steps(run_step, make_future, (), {"value": 3})

    assert asyncio.run(main()) == 3
    # The call creates the coroutine; then one step waits, and one returns.
    assert steps == ["begin", "end"] * 3
