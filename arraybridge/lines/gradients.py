"""Arrays that are being differentiated, on their way to other threads and processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from arraybridge.arrays import LEAF, kinds
from arraybridge.errors import GradientError
from arraybridge.frameworks import registry
from arraybridge.frameworks.base import Framework
from arraybridge.trees import arrays_of


def for_other_threads(items: Iterator[Any]) -> Iterator[Any]:
    """Items for functions that other threads run; an item that a tape or tracer follows is refused."""
    return map(_for_other_threads, items)  # a generator would keep the item while it waits for the next one


def _for_other_threads(item: Any) -> Any:
    cls = type(item)
    if cls is np.ndarray or kinds.get(cls) == LEAF:
        return item
    for x in arrays_of(item):
        owner = registry.find_owner(x)
        if owner is not None and owner.autodiff.stays_in_thread(x):
            raise GradientError(
                f"an array of {owner.name} is differentiated or transformed in this thread, and the function"
                " runs in another one, where it would get no gradient. Call the function itself,"
                " differentiate inside of it, or pass the array without its graph, as by tf.stop_gradient(x)",
                source_type=owner.name,
                reason="differentiated in another thread",
            )
    return item


def refuse_graph(owner: Framework, x: Any) -> None:
    """Refuse an array that would come out of a process without the graph that it has there."""
    if owner.autodiff.follows(x) and not getattr(x, "is_leaf", False):  # torch and Paddle start there
        raise GradientError(
            f"an array of {owner.name} is being differentiated, and its graph would stay behind: its graph"
            " stays in the process that made it. Send it without, as x.detach(), or compute under"
            " torch.no_grad() inside of the function",
            source_type=owner.name,
            reason="a graph does not leave its process",
        )
