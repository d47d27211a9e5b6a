"""What is seen of TensorFlow's operations while a function runs; which of them draw random numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import (
    op_callbacks,  # pyright: ignore[reportAttributeAccessIssue]
    op_def_registry,  # pyright: ignore[reportAttributeAccessIssue]
)

__all__ = ["OF_KERAS", "assigns", "drawing_among", "drawing_in", "runs_python", "watched_by"]

#: What watches operations, in any thread.
_watches: list[Any] = []
_adding_watch = threading.Lock()


@contextmanager
def watched_by(watch: Callable[..., None]) -> Iterator[None]:
    """Let it see the operations of this thread.

    Each thread has callbacks of its own; but where one removes its last, TensorFlow asks those of no other
    thread any more (2.21), so that the last of all of them has to remove it in that way.
    """
    watch = partial(watch)  # of two that are equal, one within the other, TensorFlow keeps one
    with _adding_watch:
        op_callbacks.add_op_callback(watch)
        _watches.append(watch)
    try:
        yield
    finally:
        with _adding_watch:
            _watches.remove(watch)
            (context.context() if _watches else op_callbacks).remove_op_callback(watch)


@lru_cache(4096)
def drawing_in(kind: str) -> str:
    """The operation of this type, or inside of the function of this name, that draws random numbers; or "".

    Those of tf.random.stateless_… are none: they depend on their seed alone.
    """
    return drawing_among(_nodes_of(kind)) or (kind if _draws(kind) else "")


def drawing_among(nodes: Iterable[Any]) -> str:
    """The first operation of a graph that draws random numbers, functions that it calls included; or ""."""
    for node in _with_called(nodes, set()):
        if assigns(node.op) and tf.as_dtype(_dtype_attribute(node).type).is_integer:
            return OF_KERAS
        if _draws(node.op):
            return str(node.op)
    return ""


def assigns(kind: str) -> bool:
    """Whether an operation of this type writes to a variable, or a part of one: its last argument."""
    return kind.startswith(_ASSIGNING)


def _dtype_attribute(node: Any) -> Any:
    return node.attr["dtype" if "dtype" in node.attr else "T"]


@lru_cache(4096)
def runs_python(kind: str) -> bool:
    """Whether the operation of this type, or one inside of the function of this name, is `tf.py_function`."""
    return kind == _PYTHON or any(node.op == _PYTHON for node in _with_called(_nodes_of(kind), set()))


def _nodes_of(kind: str) -> Iterable[Any]:
    here = context.context()
    return here.get_function_def(kind).node_def if here.has_function(kind) else ()


def _with_called(nodes: Iterable[Any], seen: set[str]) -> Iterator[Any]:
    """The operations of a graph, and those of the functions that it calls."""
    for node in nodes:
        yield node
        called = [f.name for value in node.attr.values() for f in (value.func, *value.list.func) if f.name]
        for kind in (node.op, *called):
            if kind not in seen:
                seen.add(kind)
                yield from _with_called(_nodes_of(kind), seen)


@lru_cache(4096)
def _draws(kind: str) -> bool:
    definition = op_def_registry.get(kind)
    seeded = definition is not None and any(a.name == "seed2" for a in definition.attr)
    return kind.startswith(_OF_A_STATE) or (seeded and not kind.startswith(_ONLY_NAMED_SEEDS))


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
_ASSIGNING = ("Assign", "ResourceScatter", "ResourceStridedSliceAssign")
OF_KERAS = "it writes to a tf.Variable of integers, as the seed generators of Keras do"
_PYTHON = "EagerPyFunc"
