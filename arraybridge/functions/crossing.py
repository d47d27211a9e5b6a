"""How values cross from one framework into an operation of another, and back."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from arraybridge.conversion.trace import listen_in, open_logs
from arraybridge.errors import GradientError
from arraybridge.frameworks.autodiff import Autodiff, Span, captured, overlap
from arraybridge.frameworks.base import Framework
from arraybridge.functions.convert import convert
from arraybridge.functions.draws import Draws
from arraybridge.options import OneWarning
from arraybridge.trees import source_of
from arraybridge.types import Device

__all__ = ["Crossing", "autodiff_of"]

_NOWHERE: Span = (0, 0)


def autodiff_of(framework: Framework) -> Autodiff:
    """The derivatives of a framework.

    Raises:
        GradientError: it has none.
    """
    if framework.autodiff is None:
        raise GradientError(
            f"{framework.name} has no derivatives that another framework could go through",
            target_type=framework.name,
        )
    return framework.autodiff


class Crossing:
    """What an operation and its pullbacks share."""

    #: Where results and gradients go: known once there are values.
    home: Device

    def __init__(self, callee: Framework, caller: Framework, bring: Callable[[Any], Any], label: str) -> None:
        self.callee, self.caller, self.label = callee, caller, label
        self.there, self.here = autodiff_of(callee), autodiff_of(caller)
        self.bring = bring
        # In force now, and again in the backward, which may run in a thread that knows nothing of them.
        self.context = contextvars.copy_context()
        self.settings = callee.scopes.thread_settings()
        self.draws = Draws()

    def then(self, run: Callable[..., Any], *args: Any) -> Any:
        """Call ``run`` as if it were when the operation was called."""
        context = self.context.copy()
        if open_logs:  # a trace around the backward hears it, and one that was around the forward no more
            listen_in(context)
        return context.run(self._under_settings, run, args)

    def _under_settings(self, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        with self.settings():
            return run(*args)

    def enter(self, x: Any) -> Any:
        """A plain array of the caller (or of NumPy) as one of the callee."""
        if self.caller.requires_grad(x):
            x = self.caller.detach(x)
        x = self.bring(x)
        self.there.admit(x, self.label)
        return x

    def entered(self, arrays: Sequence[Any]) -> list[Any]:
        """The arguments of an operation, as arrays of the callee; results go to where the first one is."""
        self.home = self.caller.device_of(arrays[0])
        with OneWarning():
            return [self.enter(x) for x in arrays]

    def leave(self, x: Any) -> Any:
        """A result or gradient as a plain array of the caller, where the caller's first array is."""
        owner, held = source_of(x)
        if owner is not self.callee:
            self._refuse_captured(owner, held)
        elif owner.requires_grad(held):
            x = held = owner.detach(held)
        there = owner.device_of(held)
        same = there.kind == self.home.kind and there.index == self.home.index
        x = convert(x, self.caller.name) if same else convert(x, self.caller.name, device=self.home)
        self.here.admit(x, self.label)
        return x

    def apart(
        self, found: list[Any], spans: list[Span | None], *, kept: Sequence[bool] | None = None
    ) -> list[Any]:
        """Arrays of the callee as ones of the caller that share no memory with one another or with ``spans``.

        Nor with anything that somebody else keeps: ``kept`` says of which that is so, and without it they are
        asked. ``found`` is used up.
        """
        for i in range(len(found)):
            x, found[i] = found[i], None  # so that nobody holds it but `x`
            if x is None:
                continue
            held = self.there.is_held(x) if kept is None else kept[i]
            new = self.leave(x)
            span = self.here.span(new)
            if held or overlap(span, spans):
                new = self.caller.copy(new)
                span = self.here.span(new)
            spans.append(span or _NOWHERE)  # a copy, if it is not known
            found[i] = new
        return found

    def to_numpy(self, x: Any) -> np.ndarray:
        owner, held = source_of(x)
        if owner is not self.callee:
            self._refuse_captured(owner, held)
        elif owner.requires_grad(held):
            x = owner.detach(held)
        result: np.ndarray = convert(x, "numpy")
        return result

    def _refuse_captured(self, owner: Framework, result: Any) -> None:
        autodiff = owner.autodiff
        if owner.requires_grad(result) or (autodiff is not None and autodiff.is_differentiated(result)):
            what = f"it returns an array of {owner.name} that is being differentiated"
            raise captured(owner.name, f"{self.label}(): {what}")
