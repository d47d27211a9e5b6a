"""The device, the stream and x64 that are selected while a decorated function runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from arraybridge.decorators.coroutines import await_in_steps
from arraybridge.device import Device
from arraybridge.interface.framework import Framework, take_over
from arraybridge.trees import map_arrays

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The selections during a call of a function, which are undone when it ends.

    Attributes:
        framework: The framework of the function.
        x64: Whether 64-bit types are enabled; None for no change.
        device: The device that is selected; None for no change.
        own_stream: Whether the function runs on a separate stream of this thread, on ``device``. That stream
            first waits for the caller's stream, and then the caller's stream waits for it, so that the caller
            can read and free the results.
    """

    framework: Framework
    x64: bool | None = None
    device: Device | None = None
    own_stream: bool = False

    def call(self, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a function in these surroundings, and return its result."""
        with self.enter():
            result = fn(*args, **kwargs)
        return self._take_over(result)

    async def call_coroutine(
        self, fn: Callable[..., Awaitable[Any]], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Call a coroutine function in these surroundings, which apply until it returns, and await it."""
        return self._take_over(await await_in_steps(self._run_step, fn, args, kwargs))

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Select the device, the stream and x64 in a ``with`` statement."""
        framework = self.framework
        with ExitStack() as stack:
            if self.x64 is not None:
                stack.enter_context(framework.runtime.x64_context(self.x64))
            if self.device is not None:
                select = framework.streams.stream if self.own_stream else framework.devices.select
                stack.enter_context(select(self.device))
            yield

    def _run_step(self, step: Callable[[], T]) -> T:
        with self.enter():
            return step()

    def _take_over(self, result: Any) -> Any:
        framework = self.framework
        if not self.own_stream:
            return result
        return map_arrays(result, lambda x: take_over(framework, x) if framework.owns(x) else x)
