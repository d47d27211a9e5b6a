"""What a call of a decorated function does: bring the arguments, run the function, give its results back.

The options decide, where the decorator is applied, which functions these three are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from arraybridge.conversion import trace
from arraybridge.conversion.trace import open_logs
from arraybridge.frameworks import registry
from arraybridge.frameworks.base import Framework
from arraybridge.functions.arguments import Args, Bring, Kwargs, bringing, first_array, named_device
from arraybridge.functions.compiling import being_compiled, keeps_graph, traced
from arraybridge.functions.options import DecoratorOptions
from arraybridge.functions.results import GiveBack, check_result, giving_back
from arraybridge.functions.slices import call_by_planes
from arraybridge.functions.wrap import label_of, takes_self
from arraybridge.memory.recovery import Recovery, attempted, faults
from arraybridge.options import card_meant
from arraybridge.timeline.events import device_words
from arraybridge.trees import map_arrays

#: What takes the arguments as they came, and returns a result.
Run = Callable[[Args, Kwargs], Any]
Compose = Callable[[Callable[..., Any], DecoratorOptions], tuple[Run, GiveBack]]


class DecoratedCall:
    """Calls a function in parts; it is pickled as what they are made of.

    Args:
        compose: makes them, of the function and the options: what brings the arguments and runs the function,
            and what gives its result back.
    """

    def __init__(self, compose: Compose, fn: Callable[..., Any], options: DecoratorOptions) -> None:
        self.__setstate__((compose, fn, options))

    def __getstate__(self) -> Any:
        return self._compose, self.fn, self.options

    def __setstate__(self, state: Any) -> None:
        self._compose, self.fn, self.options = compose, fn, options = state
        self.label, self.skip, self.keeps_graph = label_of(fn), int(takes_self(fn)), keeps_graph(options)
        self.run, self.give_back = compose(fn, options)

    def __call__(self, args: Args, kwargs: Kwargs) -> Any:
        if "torch._dynamo" in sys.modules and being_compiled():
            return traced(self, args, kwargs)
        run, give_back = self.run, self.give_back
        if not open_logs:
            return give_back(run(args, kwargs), args, kwargs)
        span = trace.span("call", self.label)
        with nullcontext() if span is None else span:
            result = run(args, kwargs)
            if span is not None:
                span.device = device_words(result)
            return give_back(result, args, kwargs)

    async def awaited(self, args: Args, kwargs: Kwargs) -> Any:
        """The same for a coroutine function."""
        span = trace.span("call", self.label, annotate=False) if open_logs else None
        with nullcontext() if span is None else span:
            return self.give_back(await self.run(args, kwargs), args, kwargs)


def as_declared(fn: Callable[..., Any], options: DecoratorOptions) -> tuple[Run, GiveBack]:
    """A function that runs as it is, and whose result is checked."""
    label = label_of(fn)
    return (
        lambda args, kwargs: fn(*args, **kwargs),
        lambda result, *_: check_result(options.contract, result, label),
    )


def in_framework(fn: Callable[..., Any], options: DecoratorOptions) -> tuple[Run, GiveBack]:
    """A function that runs in one framework, whatever arrays it is called with."""
    skip = int(takes_self(fn))
    run = _running(fn, skip, options, bringing(fn, skip, options))
    if options.oom_recovery:
        run = recovering(run, skip, options)
    return run, giving_back(fn, skip, options)


def _running(fn: Callable[..., Any], skip: int, options: DecoratorOptions, bring: Bring) -> Run:
    """What brings the arguments and calls the function, on its own stream and device."""
    body = partial(call_by_planes, fn, skip) if options.slice_by_slice else fn
    placed = options.device is not None or options.gpu_id is not None
    # Known when the framework is imported, which is not before there is an array.
    framework: Framework | None = None
    queued = True

    def run(args: Args, kwargs: Kwargs) -> Any:
        nonlocal framework, queued
        positional, named, arrays = bring(args, kwargs)
        if arrays and queued:
            framework = framework or registry.framework(options.framework)
            queued = framework.streams.has_queues and options.stream
            if queued:
                # `positional` lives until the stream of the caller waits for this one.
                first = first_array((*positional[skip:], *named.values()))
                stream = None if first is None else framework.streams.stream(framework.device_of(first))
                with stream or nullcontext():
                    result = body(*positional, **named)
                return handed_over(result, framework)
        if placed and not arrays:  # none brings the device along: it is selected for what the function makes
            framework = framework or registry.framework(options.framework)
            with framework.selected(named_device(framework, options)):
                return body(*positional, **named)
        return body(*positional, **named) if named else body(*positional)

    return run


def handed_over(result: Any, framework: Framework) -> Any:
    """What a function made on a stream of its own, to be read and freed on that of its caller."""
    return map_arrays(result, lambda x: framework.streams.take_over(x) if framework.owns(x) else x)


def recovering(run: Run, skip: int, options: DecoratorOptions) -> Run:
    """What runs again, or in parts, where memory runs out: for a conversion of the arguments, too."""
    splits = options.oom_recovery == "split"

    def recover(args: Args, kwargs: Kwargs) -> Any:
        failure = None
        if not faults:
            result, failure = attempted(run, (args, kwargs), {}, sys.exception())
            if failure is None:
                return result
        own, card = args[:skip], card_meant(options.gpu_id)
        call = Recovery(
            lambda *args, **kwargs: run((*own, *args), kwargs),
            (args[skip:], kwargs),
            failure,
            options.max_retries,
            card if isinstance(card, int) else None,
            split=splits,
            axis=options.split_axis,
            least=options.min_split,
        )
        del failure  # whose traceback holds this frame
        return call.result()

    return recover
