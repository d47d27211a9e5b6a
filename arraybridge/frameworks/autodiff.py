"""What a framework may have besides: derivatives that other frameworks go through (``grad="flow"``).

The caller is the framework that differentiates, the callee the one that a function is written in. `Autodiff`
says what a framework does as either of them; `arraybridge.decorators.gradient_flow` stands between the two.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from arraybridge.errors import GradientError

__all__ = [
    "NOT_DIFFERENTIABLE",
    "NO_STATE",
    "Autodiff",
    "Body",
    "Call",
    "Extent",
    "Function",
    "Leaf",
    "Linear",
    "Operation",
    "Shape",
    "modified_argument_error",
    "overlaps",
    "substitute",
    "select",
]

#: A function from a flat list of the callee's arrays to another one.
Body = Callable[[list[Any]], list[Any]]

#: Where an array lies in memory, from and to.
Extent = tuple[int, int]


#: What is known of an array that has no values yet: its shape, and its dtype by name.
Shape = tuple[tuple[int, ...], str]


@dataclasses.dataclass(eq=False, repr=False)
class Linear:
    """A function of the callee at a point.

    Attributes:
        pull: its pullback, from cotangents, one for each result and None where there is none, to gradients of
            the active arguments, in torch's convention for complex numbers: JAX's conjugates.
        captured: what the results depend on that is differentiable and no argument; "" for nothing.
        residuals: the arrays that `pull` reads; None where nobody knows.
    """

    pull: Callable[[list[Any]], list[Any]]
    captured: str = ""
    residuals: Sequence[Any] | None = None


class Operation(ABC):
    """A pure function of the callee on arrays of the caller, or the pullback of such a function.

    Attributes:
        active: For each argument, whether it is differentiated.
        label: The name of the function, for messages.
        differentiated: Whether the caller differentiates the results. A caller that traces sees that late.
        draws: Whether the function draws random numbers without a seed; None if that was not predicted.
        enter: Converts an array to the callee, on the device on which the function runs.
    """

    active: tuple[bool, ...]
    label: str
    differentiated: bool = True
    draws: bool | None = None
    enter: Callable[[Any], Any]

    @abstractmethod
    def linearize(self, arrays: Sequence[Any]) -> tuple[list[Any], Linear | None]:
        """Run it, and return the results and what their pullback may use.

        Without the second one, the pullback runs the function again.
        """

    @abstractmethod
    def gradients(self, arrays: Sequence[Any], cotangents: Sequence[Any], linear: Linear | None) -> list[Any]:
        """Return the gradients of the arguments, as the caller differentiates them.

        Args:
            arrays: The arguments.
            cotangents: One for each result; None if there is none.
            linear: What `linearize` returned.

        Returns:
            One gradient for each argument; None for arguments that are not active.
        """

    @abstractmethod
    def read_again(self, results: list[Any], linear: Linear | None) -> list[Any]:
        """Return the results whose memory the pullback reads, so that they may not be written to."""

    @abstractmethod
    def pullback(
        self, arrays: Sequence[Any], cotangents: Sequence[Any], linear: Linear | None
    ) -> tuple[Operation, list[Any]]:
        """Return the operation that computes the gradients of the active arguments, and its arguments.

        ``cotangents`` has one for each result; None if there is none.
        """

    # -- for callers that trace --------------------------------------------------------------------

    @abstractmethod
    def predict(self, shapes: list[Shape]) -> list[Shape]:
        """Return the shapes and dtypes of the results for arguments of these shapes and dtypes."""

    @abstractmethod
    def on_host(self, arrays: Sequence[np.ndarray], states: Sequence[Any]) -> list[np.ndarray]:
        """Return the results as NumPy arrays, while a program of the caller occupies its thread.

        ``states`` has the random state before the first run. It is empty for the first run, and for functions
        that draw no random numbers.
        """

    @abstractmethod
    def replaying(self, state: Any) -> Operation:
        """Return the same operation with this random state before its first run."""

    @abstractmethod
    def random_state(self) -> np.ndarray:
        """Return the callee's random state as it is now."""


class Autodiff:
    """What a framework does as the caller and as the callee; as it stands here, it has no derivatives."""

    # -- its arrays --------------------------------------------------------------------------------

    def requires_grad(self, x: Any) -> bool:
        """Return whether a conversion of ``x`` to another framework would drop its graph."""
        return False

    def detach(self, x: Any) -> Any:
        """Return the values of ``x`` without their graph, in the same memory."""
        return x

    def is_tracked(self, x: Any) -> bool:
        """Whether a graph, tape or tracer follows this array, in this thread."""
        return False

    def is_bound_to_thread(self, x: Any) -> bool:
        """Whether something follows ``x`` that does not follow it into another thread."""
        return self.is_tracked(x)

    def prepare(self, x: Any) -> Any:
        """An array that keeps its values, where that costs nothing: the value of a variable, for one."""
        return x

    def plain_value(self, x: Any) -> Any:
        """What a function is passed in place of an argument that is no array: itself, or its value."""
        return x

    def version(self, x: Any) -> int:
        """A number that changes with each write to the array, where the framework counts them."""
        return 0

    def is_differentiable(self, x: Any) -> bool:
        """Whether its dtype can be differentiated."""
        return _is_differentiable(x.dtype)

    def span(self, x: Any) -> Extent:
        """Its memory; (0, 0) where nobody knows."""
        raise NotImplementedError

    # -- as the caller -----------------------------------------------------------------------------

    def apply(self, operation: Operation, arrays: list[Any]) -> list[Any]:
        """The results of an operation, as this framework differentiates them."""
        raise NotImplementedError

    # -- as the callee -----------------------------------------------------------------------------

    def run(self, body: Body, arrays: list[Any], label: str) -> list[Any]:
        """Call a function; refuse one that writes to its arguments, where this framework shows that."""
        versions = list(map(self.version, arrays))
        results = body(arrays)
        if list(map(self.version, arrays)) != versions:
            raise modified_argument_error(label)
        return results

    def linearize(
        self, body: Body, arrays: list[Any], active: Sequence[bool], label: str
    ) -> tuple[list[Any], Linear]:
        """Run a function, and keep what its pullback in the active arguments needs."""
        raise NotImplementedError

    def predict(self, body: Body, shapes: list[Shape], label: str) -> tuple[list[Shape], str, bool]:
        """For callers that trace: the shapes of its results, what it captures, and whether it draws numbers.

        The last two are as `Linear.captured` says, and for random numbers that it is not passed.
        """
        raise unpredictable_shapes_error(label, "its framework cannot run without values")

    def check_argument(self, x: Any, label: str) -> None:
        """Refuse an array that could not keep its values here."""

    def random_state(self) -> np.ndarray:
        """The state of the random numbers that functions draw without being passed any; empty for none."""
        return NO_STATE

    def set_random_state(self, state: np.ndarray) -> None:
        """Draw from now on what was drawn after this state."""

    @contextmanager
    def replayed(self, state: np.ndarray) -> Iterator[None]:
        """Draw what was drawn after this state, and leave the random numbers of the process as they are."""
        if len(state) == 0:  # the function draws none
            yield
            return
        now = self.random_state()
        self.set_random_state(state)
        try:
            yield
        finally:
            self.set_random_state(now)

    def check_repeatable(self, body: Body, arrays: list[Any], label: str) -> None:
        """Refuse to run a function again that would draw other random numbers."""


#: Where no random numbers are drawn.
NO_STATE = np.zeros(0, np.uint8)


@functools.cache
def _is_differentiable(dtype: Any) -> bool:
    return re.search("float|complex", str(dtype)) is not None


#: The derivatives of a framework that has none.
NOT_DIFFERENTIABLE = Autodiff()


class Function(ABC):
    """A decorated function of one framework, which callers of other frameworks differentiate.

    Attributes:
        fn: The user's function.
        name: The framework in which it is written, the callee.
        label: Its name, for messages.
        programs: What the callee compiled of it, by call signature and constants.
        constants: By call signature, the arguments that are constants of the program.
    """

    fn: Callable[..., Any]
    name: str
    label: str
    programs: dict[Any, Any]
    constants: dict[Any, list[bool]]

    @abstractmethod
    def run(self, call: Call, values: list[Any]) -> list[Any]:
        """Call the function with a value for each leaf, and return the arrays of its result."""

    @abstractmethod
    def key(self, call: Call) -> Any:
        """Return a key for the structure of a call. It has a hash if its parts have one."""


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Leaf:
    """One of the values that a call passes to a function, containers opened.

    Attributes:
        value: An array of the callee, or anything else; None for an array of the caller.
        is_argument: Whether it is an array of the caller, and so an argument of the operation.
        is_passed: For callees that compile: whether it is an argument of the program. If not, its value is a
            constant of the program.
    """

    value: Any
    is_argument: bool = False
    is_passed: bool = False


@dataclasses.dataclass(eq=False, repr=False)
class Call:
    """One call of the user's function, as a function of the caller's arrays alone."""

    function: Function
    #: ``self``, where it is a method.
    own: tuple[Any, ...]
    #: Of the other arguments, and of those that were named.
    structure: Any
    leaves: list[Leaf]
    #: Makes what the function returned of its arrays, once it has run.
    refill: Callable[[Iterator[Any]], Any] = list

    def __call__(self, arrays: list[Any]) -> list[Any]:
        following = iter(arrays)
        values = [next(following) if leaf.is_argument else leaf.value for leaf in self.leaves]
        return self.function.run(self, values)


# -- lists ---------------------------------------------------------------------------------------------


def select(values: Sequence[Any], chosen: Sequence[bool]) -> list[Any]:
    """Those that are chosen; there may be further values."""
    return [x for x, c in zip(values, chosen, strict=False) if c]


def substitute(values: Sequence[Any], replaced: Sequence[bool], replacements: Sequence[Any]) -> list[Any]:
    """The values, with the replacements in place of those that are replaced."""
    following: Iterator[Any] = iter(replacements)
    return [next(following) if r else x for x, r in zip(values, replaced, strict=True)]


def overlaps(span: Extent, spans: Sequence[Extent]) -> bool:
    first, last = span
    for start, end in spans:  # noqa: SIM110  # twice as fast as any()
        if first < end and start < last:
            return True
    return False


# -- refusals ------------------------------------------------------------------------------------------


def unpredictable_shapes_error(label: str, why: object) -> GradientError:
    return GradientError(
        f"inside jax.jit its shapes have to be predicted, and that failed: {why}. Shapes that depend on"
        " values, and functions that read values, cannot be predicted.",
        reason="shapes cannot be predicted",
        advice="Call it outside of jax.jit.",
        place=f"{label}()",
    )


def forward_mode_error(label: str, instead: str) -> GradientError:
    return GradientError(
        "gradients across frameworks support only reverse mode.",
        reason="forward mode",
        advice=f"Use {instead}.",
        place=f"{label}()",
    )


def modified_argument_error(label: str) -> GradientError:
    return GradientError(
        "it writes to an argument, or the argument was changed after the call, and the backward pass reads it"
        " again.",
        reason="an argument is written to",
        advice="Write to a copy, x.clone().",
        place=f"{label}()",
    )
