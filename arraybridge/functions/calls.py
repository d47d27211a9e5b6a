"""What a call of a decorated function does: bring the arguments, run the function, give its results back.

The options decide, where the decorator is applied, which functions these three are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from arraybridge import batches
from arraybridge.conversion import trace
from arraybridge.conversion.trace import open_logs
from arraybridge.frameworks import registry
from arraybridge.frameworks.base import Framework, find_or_host
from arraybridge.functions.arguments import Args, Bring, Kwargs, bringing, first_array, named_device
from arraybridge.functions.compiling import being_compiled, stays_traced, untraced
from arraybridge.functions.options import DecoratorOptions, checked_options
from arraybridge.functions.results import GiveBack, check_result, giving_back
from arraybridge.functions.slices import call_by_planes
from arraybridge.functions.wrap import label_of, takes_self
from arraybridge.memory.recovery import Plan, attempted, faults, recovered
from arraybridge.placement import busy_workers, card_meant
from arraybridge.timeline.events import device_words
from arraybridge.trees import map_arrays

__all__ = ["DecoratedCall", "Parts", "Run", "as_declared", "handed_over", "in_framework", "recovering"]

#: What takes the arguments as they came, and returns a result.
Run = Callable[[Args, Kwargs], Any]
Parts = tuple[Bring, Run, GiveBack, Run]


class DecoratedCall:
    """Calls a function in three parts; it is pickled as what they are made of.

    Args:
        compose: makes them, of the function and the options: what brings the arguments, what brings them and
            runs the function, what gives its result back, and what does all that while torch.compile traces.
    """

    def __init__(self, compose: Callable[[Any, Any], Parts], fn: Callable[..., Any], options: Any) -> None:
        self.__setstate__((compose, fn, options))

    def __getstate__(self) -> Any:
        return self._origin

    def __setstate__(self, origin: Any) -> None:
        self._origin = compose, fn, options = origin
        self.fn, self.label = fn, label_of(fn)
        self.bring, self.run, self.give_back, self.traced = compose(fn, options)

    def __call__(self, args: Args, kwargs: Kwargs) -> Any:
        if "torch._dynamo" in sys.modules and being_compiled():
            return self.traced(args, kwargs)
        span = trace.span("call", self.label) if open_logs else None
        if span is None:
            return self.give_back(self.run(args, kwargs), args, kwargs)
        with span:
            result = self.run(args, kwargs)
            span.device = device_words(result)
            return self.give_back(result, args, kwargs)

    async def awaited(self, args: Args, kwargs: Kwargs) -> Any:
        """The same for a coroutine function."""
        span = trace.span("call", self.label, annotate=False) if open_logs else None
        with nullcontext() if span is None else span:
            positional, named, _ = self.bring(args, kwargs)
            return self.give_back(await self.fn(*positional, **named), args, kwargs)


def as_declared(fn: Callable[..., Any], contract: Callable[[Any], Any] | None) -> Parts:
    """A function that runs as it is, and whose result is checked."""
    label = label_of(fn)

    def run(args: Args, kwargs: Kwargs) -> Any:
        return fn(*args, **kwargs)

    def give_back(result: Any, args: Args, kwargs: Kwargs) -> Any:
        return check_result(contract, result, label)

    return (
        lambda args, kwargs: (args, kwargs, None),
        run,
        give_back,
        lambda args, kwargs: give_back(run(args, kwargs), args, kwargs),
    )


def in_framework(fn: Callable[..., Any], options: DecoratorOptions) -> Parts:
    """A function that runs in one framework, whatever arrays it is called with."""
    if options.framework == "numpy":
        options = options._replace(gpu_id=None)  # it lives on the host, whatever gpu_id says
    skip = int(takes_self(fn))
    bring = bringing(fn, skip, options)
    run = _running(fn, skip, options, bring)
    if options.oom_recovery:
        run = recovering(run, skip, options)
    give_back = giving_back(fn, skip, options)
    return bring, run, give_back, _tracing(fn, skip, options, run, give_back)


# -- the function --------------------------------------------------------------------------------------


def _running(fn: Callable[..., Any], skip: int, options: DecoratorOptions, bring: Bring) -> Run:
    """What calls the function with arguments that were positional, on its own stream and device."""
    body = partial(call_by_planes, fn, skip) if options.slice_by_slice else fn
    placed, streams = options.device is not None or options.gpu_id is not None, options.stream
    framework: Framework | None = None

    def run(args: Args, kwargs: Kwargs) -> Any:
        nonlocal framework
        positional, named, array = bring(args, kwargs)
        if array is not None:
            if framework is None:
                framework = registry.framework(options.framework)
            if streams and framework.streams.has_queues:
                # `positional` lives until the stream of the caller waits for this one.
                first = first_array(positional[skip:], named)
                with framework.streams.stream(framework.device_of(first)):
                    result = body(*positional, **named)
                return handed_over(result, framework)
        elif placed:
            with _selected(options):
                return body(*positional, **named)
        return body(*positional, **named)

    return run


def handed_over(result: Any, framework: Framework) -> Any:
    """What a function made on a stream of its own, to be read and freed on that of its caller."""
    return map_arrays(result, lambda x: framework.streams.take_over(x) if framework.owns(x) else x)


@contextmanager
def _selected(options: DecoratorOptions) -> Iterator[None]:
    """No array brings the device along: it is selected for those that the function makes."""
    if card_meant(options.gpu_id) == "auto":
        yield
        return
    framework = registry.framework(options.framework)
    with framework.selected(find_or_host(framework, named_device(framework, options))):
        yield


def recovering(run: Run, skip: int, options: DecoratorOptions) -> Run:
    """What runs again, or in parts, where memory runs out: for a conversion of the arguments, too."""
    split = options.oom_recovery == "split"
    plain = batches.plain if split else lambda tree: tree

    def recover(args: Args, kwargs: Kwargs) -> Any:
        failure = None
        if not faults:
            result, failure = attempted(run, (plain(args), plain(kwargs)), {}, sys.exception())
            if failure is None:
                return plain(result)
        own, batch, card = args[:skip], args[skip:], card_meant(options.gpu_id)
        plan = Plan(
            options.max_retries,
            card if isinstance(card, int) else None,
            split=split,
            axis=options.split_axis,
            least=options.min_split,
        )
        try:
            return recovered(lambda *args, **kwargs: run((*own, *args), kwargs), batch, kwargs, plan, failure)
        finally:
            del failure  # whose traceback holds this frame

    return recover


def _tracing(
    fn: Callable[..., Any], skip: int, options: DecoratorOptions, run: Run, give_back: GiveBack
) -> Run:
    """What torch.compile traces: one graph where the function takes and returns tensors that stay."""

    def outside(args: Args, kwargs: Kwargs) -> Any:
        return give_back(run(args, kwargs), args, kwargs)

    def traced(args: Args, kwargs: Kwargs) -> Any:
        arguments = (args[skip:], kwargs)
        if not plain or busy_workers or not stays_traced(arguments, options.device, options.gpu_id):
            return untraced(outside, args, kwargs)
        result = fn(*args, **kwargs)
        return result if stays_traced(result) else untraced(give_back, result, args, kwargs)

    output = options.output_type
    bare = options._replace(device=None, gpu_id=None, input_type=None, stream=True, output_type="torch")
    plain = output in ("torch", "input") and bare == checked_options("torch", {})
    return traced
