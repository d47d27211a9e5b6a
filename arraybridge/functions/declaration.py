"""What a call of a decorated function is: its beginning and end, and a function that runs as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from arraybridge.conversion import trace
from arraybridge.conversion.trace import open_logs
from arraybridge.functions.convert import being_compiled
from arraybridge.functions.wrap import label_of
from arraybridge.timeline.events import device_words
from arraybridge.types import Device

__all__ = ["Call", "Declaration"]


class Call:
    """What a call has to remember between its arguments and its results."""

    #: The first array among the arguments, as the caller brought it.
    first: Any = None
    #: The device of the first array that was brought to the framework; asked for only where it matters.
    place: Device | None = None
    #: What an open trace records of it, where `FunctionRun.done` ends it.
    span: trace.Span | None = None


class Declaration:
    """Runs a function as it is, and checks its contract."""

    def __init__(self, fn: Callable[..., Any], contract: Callable[[Any], Any] | None) -> None:
        self.fn = fn
        self.contract = contract
        self.label = label_of(fn)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        span = self.begun() if open_logs else None
        if span is None:
            return self.leave(self.fn(*args, **kwargs), None)
        with span:
            result = self.fn(*args, **kwargs)
            span.device = device_words(result)
            return self.leave(result, None)

    def begun(self, annotate: bool = True) -> trace.Span | None:
        """What an open trace records of a call that begins now; None where nobody listens."""
        return None if being_compiled() else trace.span("call", self.label, annotate=annotate)

    def enter(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], Call | None]:
        return args, kwargs, self.opened()

    def opened(self) -> Call:
        """What to remember of a call of a coroutine or a generator."""
        call = Call()
        if open_logs:
            call.span = self.begun(annotate=False)
        return call

    def done(self, call: Call | None, error: BaseException | None = None) -> None:
        """A coroutine or a generator has come to its end."""
        if call is not None and call.span is not None:
            call.span.end(error)

    def bring(self, value: Any) -> Any:
        """A value that is sent into a generator."""
        return value

    def leave(self, result: Any, call: Call | None) -> Any:
        if self.contract is not None:
            verdict = self.contract(result)
            # A contract that raises by itself need not return anything.
            if verdict is not None and not verdict:
                name = getattr(self.contract, "__name__", repr(self.contract))
                raise ValueError(f"{self.label}(): the result breaks its contract {name}")
        return result
