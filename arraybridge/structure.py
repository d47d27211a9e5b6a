"""Containers without what they hold, to be filled again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from arraybridge.errors import ArrayNotSupportedError
from arraybridge.trees import CONTAINERS, COPYING, TREE, Node, is_named_tuple, kind_of, kinds, opened, remade

__all__ = ["Structure", "flattened"]


class Structure:
    """A container without what it holds; of a leaf, nothing but the place of one."""

    __slots__ = ("_children", "_extra", "_like", "_make", "_type")

    def __init__(self, node: Node | None, children: Sequence[Structure]) -> None:
        self._children = children
        if node is None:
            return
        self._type, self._make, self._extra = type(node.tree), node.make, node.extra
        if self._type is list or self._type is tuple:
            self._like = node.tree[:0]
        elif node.make in COPYING:
            try:
                self._like = node.with_children([None] * len(children))
            except ArrayNotSupportedError:  # a class that looks at what it is given
                self._like = node.tree
        else:  # a registered class is made of its children and `extra` alone, and may look at them
            self._like = None

    def filled(self, leaves: Iterator[Any]) -> Any:
        """The container with the next of these leaves, in the order of `leaves_of`."""
        if self is _PLACE:
            return next(leaves)
        children = [child.filled(leaves) for child in self._children]
        if self._type is tuple:
            return tuple(children)
        return remade(self._type, self._make, self._like, children)

    def key(self) -> Any:
        """What tells it from other structures, to be hashed if all that it knows of its containers can be."""
        if self is _PLACE:
            return None
        extra = tuple(self._extra) if isinstance(self._extra, list) else self._extra
        return (self._type, extra, self._beside(), tuple(child.key() for child in self._children))

    def _beside(self) -> Any:
        """What it knows besides its children; a list, which cannot be hashed, where nobody can tell."""
        if self._like is None or (self._type is not defaultdict and _knows_nothing(self._like)):
            return None
        return self._like.default_factory if self._type is defaultdict else [self._like]


def _knows_nothing(like: Any) -> bool:
    return (type(like) in CONTAINERS or is_named_tuple(like)) and not getattr(like, "__dict__", None)


_PLACE = Structure(None, ())


def flattened(tree: Any) -> tuple[list[Any], Structure]:
    """The leaves of a container, arrays and all else, and what to fill with such leaves again."""
    leaves: list[Any] = []
    return leaves, _flattened(tree, leaves)


def _flattened(tree: Any, leaves: list[Any]) -> Structure:
    if (kinds.get(type(tree)) or kind_of(tree)) != TREE:
        leaves.append(tree)
        return _PLACE
    node = opened(tree)
    return Structure(node, [_flattened(child, leaves) for child in node.children])
