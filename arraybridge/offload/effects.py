"""What a function does besides computing its result: then it stays where its arrays are."""

from __future__ import annotations

import inspect
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from arraybridge.trees import arrays_of, leaves_of

__all__ = ["Watch"]


class Watch:
    """Looks whether a run in NumPy changes its arguments, gives them back, or draws random numbers.

    Args:
        fn: the function.
        own: what it is called with besides the arguments: self.
        arguments: in NumPy.
    """

    def __init__(self, fn: Callable[..., Any], own: tuple[Any, ...], arguments: list[Any]) -> None:
        self._arrays = [x for x in arrays_of(arguments) if isinstance(x, np.ndarray)]
        self._copies = [(x, x.copy()) for x in self._arrays if x.flags.writeable]
        self._generators = list(_generators(fn, own, arguments))
        self._states = self._random_states()

    def drew(self) -> str:
        """Whether random numbers were drawn, in words, or ``""``."""
        drawn = self._random_states() != self._states
        return "it draws random numbers, which a card would draw otherwise" if drawn else ""

    def in_place(self, result: Any) -> str:
        """Why a caller could tell that the function ran on copies of its arguments, in words, or ``""``."""
        if result is None:
            return "it returns nothing, so that it works on its arguments in place"
        if any(not _same(x, before) for x, before in self._copies):
            return "it changes its arguments in place"
        for x in arrays_of(result):
            if any(x is y for y in self._arrays):
                return "it returns its own argument, which it may have changed in place"
            if isinstance(x, np.ndarray) and any(np.may_share_memory(x, y) for y in self._arrays):
                return "it returns a view of its argument, in which changes in place show"
        return ""

    def _random_states(self) -> list[bytes]:
        states: list[Any] = [random.getstate(), np.random.get_state(legacy=False)]  # noqa: NPY002  # that is asked
        for generator in self._generators:
            is_old = isinstance(generator, np.random.RandomState)
            states.append(generator.get_state(legacy=False) if is_old else generator.bit_generator.state)
        return [pickle.dumps(state) for state in states]


def _same(x: np.ndarray[Any, Any], before: np.ndarray[Any, Any]) -> bool:
    return np.array_equal(x, before, equal_nan=x.dtype.kind in "fc")


def _generators(fn: Callable[..., Any], own: tuple[Any, ...], arguments: list[Any]) -> Iterator[Any]:
    """The random generators among the arguments, the attributes of self, and what the function names."""
    within = [*leaves_of(arguments)]
    for holder in own:
        within.extend(getattr(holder, "__dict__", {}).values())
    plain = inspect.unwrap(fn)
    if inspect.isfunction(plain):
        names = inspect.getclosurevars(plain)
        within += [*names.nonlocals.values(), *names.globals.values()]
    return (x for x in within if isinstance(x, (np.random.Generator, np.random.RandomState)))
