"""Await a coroutine, and run each of its steps in the same surroundings."""

from __future__ import annotations

import types
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from typing import Any, NamedTuple, TypeVar

__all__ = ["await_in_steps"]

T = TypeVar("T")


class Step(NamedTuple):
    """A part of a coroutine, up to an ``await`` that has to wait, or to its end.

    Attributes:
        is_last: Whether the coroutine has returned.
        value: The result of the coroutine, or the value that it passes to the event loop.
    """

    is_last: bool
    value: Any


@types.coroutine
def await_in_steps(
    run_step: Callable[[Callable[[], Any]], Any], fn: Callable[..., Awaitable[T]], args: Any, kwargs: Any
) -> Generator[Any, Any, T]:
    """Call a coroutine function, run each step of the coroutine in ``run_step``, and return its result.

    ``run_step`` calls a function, usually in a ``with`` statement, and returns its result.

    Between two steps, the thread runs other coroutines. The current device, the current stream and x64 belong
    to the thread, so each step has to select them again, and to restore them when it stops.
    """
    coroutine = run_step(partial(_await, fn, args, kwargs))
    resume = partial(coroutine.send, None)
    while True:
        step = run_step(partial(_take_step, resume))
        if step.is_last:
            result: T = step.value
            return result
        try:
            received = yield step.value
        except GeneratorExit:
            run_step(coroutine.close)
            raise
        except BaseException as error:  # noqa: BLE001  # the event loop may raise anything at an ``await``
            resume = partial(coroutine.throw, error)
        else:
            resume = partial(coroutine.send, received)


async def _await(fn: Callable[..., Awaitable[T]], args: Any, kwargs: Any) -> T:
    """Make a coroutine of any object that can be awaited. The first step calls the function."""
    return await fn(*args, **kwargs)


def _take_step(resume: Callable[[], Any]) -> Step:
    try:
        return Step(is_last=False, value=resume())
    except StopIteration as stop:  # it must not pass through ``with`` statements that are generators
        return Step(is_last=True, value=stop.value)
