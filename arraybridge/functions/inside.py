"""What runs inside of a function that another framework differentiates: what it captures is noticed there."""

from __future__ import annotations

import contextvars
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from arraybridge.frameworks import registry
from arraybridge.frameworks.autodiff import captured, refusals, runs_again
from arraybridge.frameworks.base import Framework
from arraybridge.functions.crossing import autodiff_of

__all__ = [
    "WITH_DERIVATIVES",
    "Mark",
    "differentiates_around",
    "differentiating",
    "mark_of",
    "may_be_written_to",
    "noticing",
    "refuse_graphs_around",
]

#: The frameworks of the house that have derivatives, known without importing them.
WITH_DERIVATIVES = ("torch", "jax", "tensorflow", "mlx", "paddle")

#: Who differentiates, and how often something was refused before.
Mark = tuple[frozenset[str], int]

_callers: contextvars.ContextVar[frozenset[str]] = contextvars.ContextVar("callers", default=frozenset())


def mark_of(caller: Framework) -> Mark:
    """What tells programs apart: one of other callers, or from before a refusal, was not looked into."""
    return _callers.get() | {caller.name}, refusals.count


def may_be_written_to(caller: Framework) -> bool:
    """Whether what ``caller`` gets can be written to later, by itself or by who called what is around."""
    return caller.mutable or any(registry.framework(name).mutable for name in _callers.get())


def differentiates_around(framework: str) -> bool:
    """Whether a framework differentiates a function of another one, inside of which this is called."""
    return framework in _callers.get()


def refuse_graphs_around(framework: str, results: Iterable[Any], label: str) -> None:
    """Refuse results with a graph, of a function that was given nothing with one: it ends here.

    Raises:
        GradientError: the framework differentiates around, and would give what they depend on no gradient.
    """
    if differentiates_around(framework):
        for x in results:
            owner = registry.find_owner(x)
            if owner is not None and owner.name == framework and owner.requires_grad(x):
                raise captured(framework, f"{label}(): it depends on a trainable tensor")


@contextmanager
def differentiating(framework: str) -> Iterator[None]:
    """A context in which a framework differentiates a function of another one."""
    token = _callers.set(_callers.get() | {framework})
    try:
        yield
    finally:
        _callers.reset(token)


@contextmanager
def noticing(
    caller: Framework, mark: Mark, label: str, function: Any, passed: Sequence[Any]
) -> Iterator[None]:
    """A context for a function: what it captures of ``caller`` is refused. See `Autodiff.noticing`."""
    token = _callers.set(mark[0])
    try:
        with ExitStack() as stack:
            # Once more where it runs again, for a pullback: random numbers inside would be others.
            for name in WITH_DERIVATIVES:
                for framework in registry.loaded(name):
                    stack.enter_context(autodiff_of(framework).traced_apart((mark, runs_again.get())))
            stack.enter_context(autodiff_of(caller).noticing(label, function, passed))
            yield
    finally:
        _callers.reset(token)
