"""Arrays that are being differentiated, on their way to other threads and processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from arraybridge.arrays import LEAF, kinds
from arraybridge.errors import GradientError
from arraybridge.frameworks import registry
from arraybridge.frameworks.autodiff import Autodiff
from arraybridge.trees import arrays_of


def for_other_threads(items: Iterator[Any]) -> Iterator[Any]:
    """Items for functions that other threads run; an item that a tape or tracer follows is refused."""
    return map(_for_other_threads, items)  # a generator would keep the item while it waits for the next one


def _for_other_threads(item: Any) -> Any:
    cls = type(item)
    if cls is np.ndarray or kinds.get(cls) == LEAF:
        return item
    for autodiff, leaf, name in _derived(item):
        if autodiff.stays_in_thread(leaf):
            raise GradientError(
                f"an array of {name} is differentiated or transformed in this thread, and the function runs"
                " in another one, where it would get no gradient. Call the function itself, differentiate"
                " inside of it, or pass the array without its graph, as by tf.stop_gradient(x)",
                source_type=name,
                reason="differentiated in another thread",
            )
    return item


def refuse_graphs(result: Any) -> None:
    """Refuse what would come out of a process without the graph that it has there."""
    for autodiff, leaf, name in _derived(result):
        if autodiff.follows(leaf) and not getattr(leaf, "is_leaf", False):  # torch and Paddle start there
            raise GradientError(
                f"an array of {name} is being differentiated, and its graph would stay behind: its graph"
                " stays in the process that made it. Send it without, as x.detach(), or compute under"
                " torch.no_grad() inside of the function",
                source_type=name,
                reason="a graph does not leave its process",
            )


def _derived(item: Any) -> Iterator[tuple[Autodiff, Any, str]]:
    """The arrays that have derivatives, with those and the name of their framework."""
    for leaf in arrays_of(item):
        owner = registry.find_owner(leaf)
        if owner is not None:
            yield owner.autodiff, leaf, owner.name
