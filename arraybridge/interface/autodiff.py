"""The interface for gradients that pass through functions of another framework (``grad="flow"``).

The *caller* is the framework that differentiates. The *callee* is the framework that the function is written
in. `Autodiff` is the interface of a framework in both roles; `arraybridge.decorators.gradient_flow` connects
the two.
"""

from __future__ import annotations

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
    "error_for_modified_argument",
    "overlaps",
    "select",
    "substitute",
]

#: A function that takes and returns a flat list of arrays of its own framework.
Body = Callable[[list[Any]], list[Any]]

#: The memory range of an array: the address of its first byte and the address after its last byte.
Extent = tuple[int, int]


#: The shape and the dtype name of an array that has no values yet.
Shape = tuple[tuple[int, ...], str]


# The data classes in this module are plain classes, because dataclasses would take 3 % of the time of
# `import arraybridge`.
class Linear:
    """The derivative of a function at a point, computed by the framework of the function.

    Attributes:
        pull: The pullback. It takes one cotangent per result, or None, and returns the gradients of the
            active arguments. Complex gradients follow PyTorch's convention: they are the conjugates of the
            gradients that JAX returns.
        captured: A description of a differentiable value that the results depend on and that is not an
            argument, such as ``"a trainable tensor"``; ``""`` if there is none.
        residuals: The arrays that `pull` reads; None if they are unknown.
    """

    def __init__(
        self,
        pull: Callable[[list[Any]], list[Any]],
        captured: str = "",
        residuals: Sequence[Any] | None = None,
    ) -> None:
        self.pull = pull
        self.captured = captured
        self.residuals = residuals


class Operation(ABC):
    """A pure function as an operation on arrays of another framework, or the pullback of such a function.

    The *caller* is the framework that differentiates.

    Attributes:
        active: For each argument, whether it is differentiated.
        label: The name of the function in messages.
        differentiated: Whether the caller differentiates the results. A caller that traces sets it to True
            only when it computes derivatives.
        draws: Whether the function draws random numbers without a seed; None if that was not predicted.
        enter: Converts an array to the function's framework, on the device where the function runs.
    """

    active: tuple[bool, ...]
    label: str
    differentiated: bool = True
    draws: bool | None = None
    enter: Callable[[Any], Any]

    @abstractmethod
    def linearize(self, arrays: Sequence[Any]) -> tuple[list[Any], Linear | None]:
        """Run the operation.

        Args:
            arrays: The arguments.

        Returns:
            The results, and the derivative for their pullback. If the derivative is None, the pullback runs
            the function again.
        """

    @abstractmethod
    def gradients(self, arrays: Sequence[Any], cotangents: Sequence[Any], linear: Linear | None) -> list[Any]:
        """Return the gradients of the arguments, as arrays that the caller's framework can differentiate.

        Args:
            arrays: The arguments.
            cotangents: One cotangent per result; None for results without one.
            linear: The derivative that `linearize` returned.

        Returns:
            One gradient per argument; None for arguments that are not active.
        """

    @abstractmethod
    def find_read_again(self, results: list[Any], linear: Linear | None) -> list[Any]:
        """Return the results that the pullback reads again and that must therefore not be modified.

        Args:
            results: The results that `linearize` returned.
            linear: The derivative that `linearize` returned.

        Returns:
            Some of the results.
        """

    @abstractmethod
    def pullback(
        self, arrays: Sequence[Any], cotangents: Sequence[Any], linear: Linear | None
    ) -> tuple[Operation, list[Any]]:
        """Return the operation that computes the gradients of the active arguments.

        Args:
            arrays: The arguments.
            cotangents: One cotangent per result; None for results without one.
            linear: The derivative that `linearize` returned.

        Returns:
            The operation, and its arguments.
        """

    # -- for callers that trace --------------------------------------------------------------------

    @abstractmethod
    def predict(self, shapes: list[Shape]) -> list[Shape]:
        """Predict the shapes and dtypes of the results.

        Args:
            shapes: The shape and dtype of each argument.

        Returns:
            The shape and dtype of each result.

        Raises:
            GradientError: If the shapes and dtypes cannot be predicted.
        """

    @abstractmethod
    def on_host(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Run the operation on NumPy arrays, in a callback from a compiled program of the caller's framework.

        Args:
            arrays: The arguments.

        Returns:
            The results.
        """

    @abstractmethod
    def copy_with_state(self, state: Any) -> Operation:
        """Return the same operation with a given random state before its first run.

        Args:
            state: A random state that `random_state` returned.

        Returns:
            The operation.
        """

    @abstractmethod
    def random_state(self) -> np.ndarray:
        """Return the current random state of the function's framework."""


class Autodiff:
    """The automatic differentiation of a framework. This base class supports neither of the two roles.

    As the *caller*, the framework differentiates a function that is written in another framework. As the
    *callee*, it is the framework in which the function is written.

    Attributes:
        constant_advice: For the callee: how to use a captured array ``w`` as a constant in the function.
        module_advice: For the callee: how to pass the parameters of a module as arguments, as a sentence.
        argument_advice: For the caller: how to pass a captured array ``w`` as an argument.
    """

    constant_advice = "use a copy of its values in the function"
    module_advice = ""
    argument_advice = "convert it to the framework that differentiates the function"

    # -- arrays of the framework -------------------------------------------------------------------

    def requires_grad(self, x: Any) -> bool:
        """Return whether converting an array to another framework would drop the array's graph.

        Args:
            x: An array of the framework.

        Returns:
            False by default.
        """
        return False

    def detach(self, x: Any) -> Any:
        """Return the values of an array without its graph.

        Args:
            x: An array of the framework.

        Returns:
            An array that shares the memory of ``x``.
        """
        return x

    def is_tracked(self, x: Any) -> bool:
        """Return whether a graph, tape or tracer tracks an array in this thread.

        Args:
            x: An array of the framework.

        Returns:
            False by default.
        """
        return False

    def is_bound_to_thread(self, x: Any) -> bool:
        """Return whether an array is tracked only in the current thread, such as by a tape or a transform.

        Args:
            x: An array of the framework.

        Returns:
            By default, the same as `is_tracked`.
        """
        return self.is_tracked(x)

    def prepare(self, x: Any) -> Any:
        """Return an array that later assignments to ``x`` do not change, if that is possible without a copy.

        Args:
            x: An array of the framework.

        Returns:
            For example, the value of a variable. By default, ``x``.
        """
        return x

    def plain_value(self, x: Any) -> Any:
        """Return the value that a function receives for an argument that is not an array.

        Args:
            x: The argument.

        Returns:
            ``x`` by default.
        """
        return x

    def version(self, x: Any) -> int:
        """Return a number that changes each time an array is modified, if the framework counts modifications.

        Args:
            x: An array of the framework.

        Returns:
            Always 0 by default.
        """
        return 0

    def is_differentiable(self, x: Any) -> bool:
        """Return whether arrays of the dtype of ``x`` can be differentiated.

        Args:
            x: An array of the framework.

        Returns:
            True for floating-point and complex dtypes.
        """
        return _is_differentiable(x.dtype)

    def span(self, x: Any) -> Extent:
        """Return the memory range of an array.

        Args:
            x: An array of the framework.

        Returns:
            The address of its first byte and the address after its last byte; ``(0, 0)`` if they are unknown.

        Raises:
            NotImplementedError: If the framework does not support ``grad="flow"``.
        """
        raise NotImplementedError

    # -- as the caller -----------------------------------------------------------------------------

    def apply(self, operation: Operation, arrays: list[Any]) -> list[Any]:
        """Run an operation of another framework so that this framework can differentiate its results.

        Args:
            operation: The operation.
            arrays: Its arguments.

        Returns:
            The results, as arrays of this framework.

        Raises:
            NotImplementedError: If the framework cannot be the caller.
        """
        raise NotImplementedError

    # -- as the callee -----------------------------------------------------------------------------

    def run(self, body: Body, arrays: list[Any], label: str) -> list[Any]:
        """Call a function that must not modify its arguments.

        Args:
            body: The function.
            arrays: Its arguments.
            label: The name of the function in messages.

        Returns:
            Its results.

        Raises:
            GradientError: If the function modifies an argument, and the framework counts modifications.
        """
        versions = list(map(self.version, arrays))
        results = body(arrays)
        if list(map(self.version, arrays)) != versions:
            raise error_for_modified_argument(label)
        return results

    def linearize(
        self, body: Body, arrays: list[Any], active: Sequence[bool], label: str
    ) -> tuple[list[Any], Linear]:
        """Run a function and capture its derivative.

        Args:
            body: The function.
            arrays: Its arguments.
            active: For each argument, whether it is differentiated.
            label: The name of the function in messages.

        Returns:
            The results, and the derivative with respect to the active arguments.

        Raises:
            NotImplementedError: If the framework cannot be the callee.
        """
        raise NotImplementedError

    def predict(self, body: Body, shapes: list[Shape], label: str) -> tuple[list[Shape], str, bool]:
        """Predict the results of a function, for callers that trace.

        Args:
            body: The function.
            shapes: The shape and dtype of each argument.
            label: The name of the function in messages.

        Returns:
            The shape and dtype of each result; a description of a captured value, see `Linear.captured`; and
            whether the function draws random numbers without a seed.

        Raises:
            GradientError: If the framework cannot run the function without values.
        """
        raise unpredictable_shapes_error(label, "its framework cannot run without values")

    def check_argument(self, x: Any, label: str) -> None:
        """Raise for an array whose values this framework cannot represent exactly.

        Args:
            x: An array of the framework.
            label: The name of the function in messages.

        Raises:
            GradientError: If its values would lose precision, such as 64-bit values in JAX without x64.
        """

    def random_state(self) -> np.ndarray:
        """Return the state of the framework's default random number generators; empty if there are none."""
        return NO_STATE

    def set_random_state(self, state: np.ndarray) -> None:
        """Set the state of the framework's default random number generators.

        Args:
            state: A state that `random_state` returned.
        """

    @contextmanager
    def replay(self, state: np.ndarray) -> Iterator[None]:
        """Return a context manager that sets a random state, and restores the previous state on exit.

        Args:
            state: A state that `random_state` returned. Empty if the function draws no random numbers.
        """
        if len(state) == 0:
            yield
            return
        now = self.random_state()
        self.set_random_state(state)
        try:
            yield
        finally:
            self.set_random_state(now)

    def check_repeatable(self, body: Body, arrays: list[Any], label: str) -> None:
        """Raise for a function that would draw different random numbers if it ran again.

        Args:
            body: The function.
            arrays: Its arguments.
            label: The name of the function in messages.

        Raises:
            GradientError: If the function draws random numbers that cannot be replayed.
        """


#: The random state of functions that draw no random numbers.
NO_STATE = np.zeros(0, np.uint8)


@functools.cache
def _is_differentiable(dtype: Any) -> bool:
    return re.search("float|complex", str(dtype)) is not None


#: The `Autodiff` of frameworks without automatic differentiation.
NOT_DIFFERENTIABLE = Autodiff()


class Function(ABC):
    """A decorated function of one framework, which other frameworks can differentiate.

    Attributes:
        fn: The user's function.
        name: The name of the callee, the framework in which the function is written.
        label: The name of the function in messages.
        programs: Maps call signatures and constants to the programs that the callee has compiled.
        constants: Maps each call signature to a list that states, for each leaf, whether it is a constant of
            the program.
    """

    fn: Callable[..., Any]
    name: str
    label: str
    programs: dict[Any, Any]
    constants: dict[Any, list[bool]]

    @abstractmethod
    def call_with(self, call: Call, values: list[Any]) -> list[Any]:
        """Call the function with one value per leaf of the call, and return the arrays of the result."""

    @abstractmethod
    def key(self, call: Call) -> Any:
        """Return a key for the structure of a call, which is hashable if the values in the structure are."""


class Leaf:
    """One value in the flattened arguments of a call.

    Attributes:
        value: An array of the function's framework or any other object; None for an array of the caller's
            framework.
        is_argument: Whether the value is an array of the caller's framework, and therefore an argument of the
            operation.
        is_passed: For frameworks that compile the function: whether the value is an argument of the program
            rather than a constant of it.
    """

    __slots__ = ("is_argument", "is_passed", "value")

    def __init__(self, value: Any, is_argument: bool = False, is_passed: bool = False) -> None:
        self.value = value
        self.is_argument = is_argument
        self.is_passed = is_passed

    def with_value(self, value: Any) -> Leaf:
        """Return a leaf with the same flags and another value."""
        return Leaf(value, self.is_argument, self.is_passed)


class Call:
    """A call to the user's function, as a function of the arrays of the caller's framework.

    Attributes:
        function: The decorated function.
        own: A tuple with ``self`` if the function is a method; otherwise an empty tuple.
        structure: The containers of the other positional and keyword arguments.
        leaves: The values in the containers.
        refill: A function that rebuilds the result from its arrays. It is set when the function runs.
    """

    def __init__(self, function: Function, own: tuple[Any, ...], structure: Any, leaves: list[Leaf]) -> None:
        self.function = function
        self.own = own
        self.structure = structure
        self.leaves = leaves
        self.refill: Callable[[Iterator[Any]], Any] = list

    def with_leaves(self, leaves: list[Leaf]) -> Call:
        """Return a call to the same function with other leaves, which has not run yet."""
        return Call(self.function, self.own, self.structure, leaves)

    def __call__(self, arrays: list[Any]) -> list[Any]:
        """Run the function with ``arrays`` as its array arguments, and return the arrays of its result."""
        following = iter(arrays)
        values = [next(following) if leaf.is_argument else leaf.value for leaf in self.leaves]
        return self.function.call_with(self, values)


# -- lists ---------------------------------------------------------------------------------------------


def select(values: Sequence[Any], flags: Sequence[bool]) -> list[Any]:
    """Return the values whose flag is true, ignoring values without a flag."""
    return [x for x, flag in zip(values, flags, strict=False) if flag]


def substitute(values: Sequence[Any], flags: Sequence[bool], replacements: Sequence[Any]) -> list[Any]:
    """Return the values, with replacements for those whose flag is true."""
    following: Iterator[Any] = iter(replacements)
    return [next(following) if flag else x for x, flag in zip(values, flags, strict=True)]


def overlaps(span: Extent, spans: Sequence[Extent]) -> bool:
    """Return whether a memory range overlaps any of the other ranges."""
    first, last = span
    for start, end in spans:  # noqa: SIM110  # twice as fast as any()
        if first < end and start < last:
            return True
    return False


# -- errors --------------------------------------------------------------------------------------------


def unpredictable_shapes_error(label: str, why: object) -> GradientError:
    """Return the error for a function whose result shapes cannot be predicted."""
    cause = str(why).removesuffix(".")
    return GradientError(
        f"inside jax.jit, the shapes of the results must be predicted, which failed: {cause}. This is"
        " impossible if shapes depend on values, or if the function reads values.",
        reason="shapes cannot be predicted",
        advice="Call it outside of jax.jit.",
        place=f"{label}()",
    )


def forward_mode_error(label: str, instead: str) -> GradientError:
    """Return the error for forward-mode differentiation."""
    return GradientError(
        "gradients across frameworks support only reverse mode.",
        reason="forward mode",
        advice=f"Use {instead}.",
        place=f"{label}()",
    )


def error_for_modified_argument(label: str) -> GradientError:
    """Return the error for an argument that was modified by the function or before the backward pass."""
    return GradientError(
        "the function writes to an argument, or an argument was modified after the call. The backward pass"
        " reads the argument again.",
        reason="an argument is modified",
        advice="Modify a copy instead, such as x.clone().",
        place=f"{label}()",
    )
