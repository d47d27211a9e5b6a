"""What is seen of TensorFlow's operations while a function runs; which of them draw random numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import (
    op_callbacks,  # pyright: ignore[reportAttributeAccessIssue]
    op_def_registry,  # pyright: ignore[reportAttributeAccessIssue]
)

__all__ = ["ASSIGNING", "OF_KERAS", "drawing_among", "drawing_in", "watched_by"]

#: What watches operations, in any thread.
_watches: list[Any] = []
_adding_watch = threading.Lock()


@contextmanager
def watched_by(watch: Callable[..., None]) -> Iterator[None]:
    """Let it see the operations of this thread.

    Each thread has callbacks of its own; but where one removes its last, TensorFlow asks those of no other
    thread any more (2.21), so that the last of all of them has to remove it in that way.
    """
    with _adding_watch:
        op_callbacks.add_op_callback(watch)
        _watches.append(watch)
    try:
        yield
    finally:
        with _adding_watch:
            _watches.remove(watch)
            (context.context() if _watches else op_callbacks).remove_op_callback(watch)


def drawing_in(kind: str) -> str:
    """The operation of this type, or inside of the function of this name, that draws random numbers; or "".

    Those of tf.random.stateless_… are none: they depend on their seed alone.
    """
    found = _drawing.get(kind)
    if found is None:
        if len(_drawing) >= 4096:
            _drawing.clear()
        if context.context().has_function(kind):
            found = drawing_among(context.context().get_function_def(kind).node_def)
        else:
            definition = op_def_registry.get(kind)
            seeded = definition is not None and any(a.name == "seed2" for a in definition.attr)
            draws = kind.startswith(_OF_A_STATE) or (seeded and not kind.startswith(_ONLY_NAMED_SEEDS))
            found = kind if draws else ""
        _drawing[kind] = found
    return found


def drawing_among(nodes: Iterable[Any]) -> str:
    """The first operation of a graph that draws random numbers, functions that it calls included; or ""."""
    for node in nodes:
        if node.op in ASSIGNING and tf.as_dtype(node.attr["dtype"].type).is_integer:
            return OF_KERAS
        called = [f.name for value in node.attr.values() for f in (value.func, *value.list.func) if f.name]
        for kind in (node.op, *called):
            drawing = drawing_in(kind)
            if drawing:
                return drawing
    return ""


#: Operations that draw from a state which they are given; all others have two seeds as attributes, zeros too.
_OF_A_STATE = (
    "Rng",
    "NonDeterministicInts",
    "StatefulRandom",
    "StatefulStandard",
    "StatefulTruncated",
    "StatefulUniform",
    # Of tf.data, which may shuffle, and which another run takes on from where this one left it.
    "Iterator",
    "OneShotIterator",
    "ReduceDataset",
    "DatasetToSingleElement",
    # Each gives something else when it runs again.
    *("CountUpTo", "ResourceCountUpTo", "QueueDequeue", "Timestamp"),
)
#: Those that have the attributes and draw nothing; cuDNN's would for a dropout, which Keras never has.
_ONLY_NAMED_SEEDS = ("ComputeAccidentalHits", "Cudnn")
#: Keras draws by stateless operations, with seeds from a variable of integers that it counts up.
ASSIGNING = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")
OF_KERAS = "it writes to a tf.Variable of integers, as the seed generators of Keras do"
_drawing: dict[str, str] = {}
