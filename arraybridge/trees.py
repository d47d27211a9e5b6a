"""Containers: what is an array, what is looked into, and going through it. The only ones in the house.

Looked into are dicts, lists, tuples, named tuples and deques; what is registered with optree (in its global
namespace or in ``"arraybridge"``), dataclasses among them; and subclasses of dict, list, tuple and deque that
can be rebuilt. Two containers agree where their types, their keys or lengths, and what else optree says of
them agree; dicts agree whatever the order of their keys.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np

from arraybridge.errors import ArrayNotSupportedError, CannotSplitError, MemoryConversionError, text_of
from arraybridge.frameworks import registry
from arraybridge.frameworks.base import Framework
from arraybridge.frameworks.foreign import foreign_framework, is_foreign_array, offers_alone
from arraybridge.types import Cache

__all__ = [
    "ARRAY",
    "CONTAINERS",
    "COPYING",
    "LEAF",
    "Node",
    "TREE",
    "arrays_of",
    "is_array",
    "is_named_tuple",
    "kind_of",
    "kinds",
    "leaves_of",
    "map_arrays",
    "opened",
    "outline",
    "prefix",
    "refuse_circle",
    "remade",
    "source_of",
    "together",
]

#: What a value is: no array and no container, an array, or a container to look into.
LEAF, ARRAY, TREE = 1, 2, 3
# Each value of the class is asked anew: it may be registered with optree at any time, or have a protocol of
# its own.
_OPEN = 0
# An array, but others of its class may be none.
_ALONE = -1

#: Namespace of the classes that are registered with optree for arraybridge alone.
_NAMESPACE = "arraybridge"

_PLAIN = (
    *(int, float, complex, bool, str, bytes, type(None), slice, range),
    *(FunctionType, BuiltinFunctionType, MethodType),
)
CONTAINERS = (dict, list, tuple, OrderedDict, defaultdict, deque)
_BASES = (dict, list, tuple, deque)
# What the class of a container may raise that does not let itself be copied or filled.
_REFUSALS = (TypeError, ValueError, AttributeError, LookupError, RuntimeError)

#: Type → what its values are. Where every microsecond counts, ``kinds.get(type(x)) or kind_of(x)``.
kinds: Cache[type, int] = Cache()


def kind_of(value: Any) -> int:
    """`LEAF`, `ARRAY` or `TREE`."""
    cls = type(value)
    kind = kinds.get(cls)
    if kind is None:
        if cls in _PLAIN or isinstance(value, (np.generic, type)):
            kind = LEAF
        elif cls in CONTAINERS:
            kind = TREE
        else:
            kind = _look(value)
            if kind == _ALONE:
                return ARRAY  # this says nothing of its class
            if kind == LEAF:
                return LEAF  # neither does this
        kinds.keep(cls, kind)
    return kind or _look_again(value)


def _look(value: Any) -> int:
    if registry.find_owner(value) is not None:
        return ARRAY  # torch.compile, should it trace this, cannot ask a tensor what it offers itself
    array = is_foreign_array(value)
    if array and not offers_alone(value):
        return ARRAY
    if _is_registered(value):
        return TREE
    if array:
        return _ALONE
    return _rebuilt(value) if isinstance(value, _BASES) else _OPEN


def _look_again(value: Any) -> int:
    if _is_registered(value):
        return TREE
    return ARRAY if offers_alone(value) else LEAF


# A look at the first value of a type may import a framework and take a lock: torch.compile cannot trace that.
# By this mark, which torch.compiler.assume_constant_result leaves, it calls it while it traces; what that
# returns is remembered by `kind_of`, which it does trace. (That function itself would import torch here.)
_look._dynamo_marked_constant = True  # type: ignore[attr-defined]
_look_again._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_array(x: Any) -> bool:
    """Whether ``x`` is an array that can be a source."""
    return registry.find_owner(x) is not None or is_foreign_array(x)


def source_of(x: Any) -> tuple[Framework, Any]:
    """The framework of an array, and the array to read (foreign CUDA arrays are imported first).

    Raises:
        UnknownArrayError: it is no array.
    """
    owner = registry.find_owner(x)
    if owner is not None:
        return owner, x
    if not is_foreign_array(x):
        raise registry.unknown_array(x)
    return foreign_framework(x)


# -- one container -------------------------------------------------------------------------------------


class Node:
    """A container, opened: what it holds, and what else tells it from others of its type."""

    __slots__ = ("children", "extra", "make", "names", "tree")

    def __init__(
        self,
        tree: Any,
        children: Sequence[Any],
        names: Callable[[int], str],
        make: Callable[[Any, Sequence[Any]], Any],
        extra: Any = None,
    ) -> None:
        self.tree = tree
        self.children = children
        #: The place of a child in words, as ``[0]`` or ``.image``.
        self.names = names
        self.make = make
        self.extra = extra

    def with_children(self, children: Sequence[Any]) -> Any:
        """A container like this one, of other things."""
        return remade(type(self.tree), self.make, self.tree, children)


def remade(cls: type, make: Callable[[Any, Sequence[Any]], Any], like: Any, children: Sequence[Any]) -> Any:
    try:
        return make(like, children)
    except _REFUSALS as error:
        name = cls.__qualname__
        raise ArrayNotSupportedError(
            f"a container of type {name} cannot be rebuilt with other arrays ({error}); pass a plain one,"
            " or register its class with optree.register_pytree_node(..., namespace='arraybridge')",
            reason=f"{name} cannot be rebuilt",
        ) from error


def opened(tree: Any) -> Node:
    """The container, opened; as an empty one where it is none."""
    cls = type(tree)
    if cls not in CONTAINERS and not is_named_tuple(tree) and _is_registered(tree):
        return _registered_node(tree)
    if isinstance(tree, dict):
        keys = list(tree)
        values = list(tree.values()) if cls is dict else [tree[key] for key in keys]
        return Node(tree, values, lambda i: f"[{keys[i]!r}]", _make_dict, keys)
    if isinstance(tree, tuple):
        fields = getattr(cls, "_fields", None) if is_named_tuple(tree) else None
        return Node(tree, tree, lambda i: f"[{i}]" if fields is None else f".{fields[i]}", _make_tuple)
    if isinstance(tree, deque):
        return Node(tree, list(tree), lambda i: f"[{i}]", _make_deque, tree.maxlen)
    if isinstance(tree, list):
        return Node(tree, tree, lambda i: f"[{i}]", _make_list)
    return Node(tree, (), str, lambda *_: tree)  # its class is not registered any more


def _make_dict(like: dict[Any, Any], values: Sequence[Any]) -> Any:
    keys = list(like)
    if type(like) is dict:
        return dict(zip(keys, values, strict=True))
    made = copy.copy(like)  # keeps what it has besides, such as a default factory and its order
    for key, value in zip(keys, values, strict=True):
        made[key] = value
    return made


def _make_list(like: list[Any], values: Sequence[Any]) -> Any:
    if type(like) is list:
        return list(values)
    made = copy.copy(like)
    made[:] = values
    return made


def _make_tuple(like: tuple[Any, ...], values: Sequence[Any]) -> Any:
    made = tuple.__new__(type(like), values)  # as a named tuple's _make does
    if hasattr(like, "__dict__"):
        made.__dict__.update(like.__dict__)
    return made


def _make_deque(like: deque[Any], values: Sequence[Any]) -> Any:
    made = copy.copy(like)
    made.clear()
    made.extend(values)
    return made


#: What makes a container by a copy of another one, and keeps what it has besides.
COPYING = (_make_dict, _make_list, _make_tuple, _make_deque)


def _rebuilt(tree: Any) -> int:
    """`TREE`; `_OPEN` where the class refuses to be rebuilt; `LEAF` where that says nothing of others."""
    if not tree:
        return LEAF
    node = opened(tree)
    try:
        made = node.make(tree, list(node.children))
        if type(made) is not type(tree) or made is tree:
            return _OPEN
        again = opened(made)
    except _REFUSALS:
        return _OPEN
    # What sets its values in a way of its own, as one that wraps dicts, may keep those of others.
    same = len(again.children) == len(node.children) and all(
        a is b for a, b in zip(again.children, node.children, strict=True)
    )
    return TREE if same else LEAF


def is_named_tuple(x: Any) -> bool:
    return isinstance(x, tuple) and hasattr(type(x), "_fields")


def _is_registered(x: Any) -> bool:
    """Whether optree looks into it: a named tuple, a structseq, or of a class that is registered by now."""
    import optree

    return not optree.tree_is_leaf(x, none_is_leaf=True, namespace=_NAMESPACE)


def _registered_node(tree: Any) -> Node:
    import optree

    one = optree.tree_flatten_one_level(tree, none_is_leaf=True, namespace=_NAMESPACE)

    def name(i: int) -> str:
        return str(one.path_entry_type(one.entries[i], one.type, one.kind).codify(""))

    unflatten, metadata = one.unflatten_func, one.metadata
    return Node(tree, one.children, name, lambda _, values: unflatten(metadata, tuple(values)), metadata)


# -- going through it ----------------------------------------------------------------------------------


def leaves_of(tree: Any) -> Iterator[Any]:
    """What is no container, arrays and all else, in order.

    Raises:
        ValueError: a container contains itself.
    """
    if (kinds.get(type(tree)) or kind_of(tree)) != TREE:
        yield tree
        return
    try:
        for child in _children(tree):
            if (kinds.get(type(child)) or kind_of(child)) == TREE:
                yield from leaves_of(child)
            else:
                yield child
    except RecursionError:
        refuse_circle(tree)
        raise


def refuse_circle(tree: Any) -> None:
    """To be asked after a `RecursionError`, which may have other reasons.

    Raises:
        ValueError: a container in there contains itself.
    """
    around: dict[int, Any] = {}  # those that the next one is in, which it may not be
    done: dict[int, Any] = {}  # both hold them, so that no other object gets their numbers
    waiting = [(tree, False)]
    while waiting:
        one, left = waiting.pop()
        if left:
            del around[id(one)]
            done[id(one)] = one
        elif id(one) in around:
            raise ValueError(
                f"{outline(one)} contains itself, so that there is no end of looking for arrays in it; pass"
                " a container without the reference to itself"
            ) from None
        elif id(one) not in done and (kinds.get(type(one)) or kind_of(one)) == TREE:
            around[id(one)] = one
            waiting.append((one, True))
            waiting += [(child, False) for child in _children(one)]


def _children(tree: Any) -> Iterable[Any]:
    cls = type(tree)
    if cls is dict:
        return list(tree.values())
    return tree if cls is tuple or cls is list else opened(tree).children


def arrays_of(tree: Any, *, also: type | tuple[type, ...] = ()) -> list[Any]:
    """The arrays in nested containers, and leaves of the types ``also`` (``np.generic``: NumPy's scalars)."""
    kind = kinds.get(type(tree))
    if kind == ARRAY:
        return [tree]
    if kind == LEAF and not also:
        return []
    return [
        leaf
        for leaf in leaves_of(tree)
        if (kinds.get(type(leaf)) or kind_of(leaf)) == ARRAY or isinstance(leaf, also)
    ]


def prefix(error: Exception, where: str) -> None:
    """Say in the message of an error of ours what it is about; its class and its attributes stay."""
    if isinstance(error, MemoryConversionError):
        error.args = (f"{where}: {text_of(error) or type(error).__name__}",)


def map_arrays(
    tree: Any,
    change: Callable[[Any], Any],
    *,
    also: type | tuple[type, ...] = (),
    say: Callable[[Exception, str], None] = prefix,
) -> Any:
    """The tree with each array replaced by what ``change`` makes of it; the very object where none changed.

    Containers keep their types, and dictionaries their order. What is no array stays the very object.

    Args:
        tree: an array, a container, or anything else.
        change: a function of one array.
        also: types of leaves to call it for as well, as ``np.generic`` for NumPy's scalars.
        say: puts the place of the array, as ``at ['batch'][0].image``, into a `MemoryConversionError` or
            `ValueError` that it raises.

    Raises:
        MemoryConversionError: from ``change``.
        ArrayNotSupportedError: a container cannot be rebuilt.
        ValueError: a container contains itself.
    """
    kind = kinds.get(type(tree)) or kind_of(tree)
    if kind == ARRAY or isinstance(tree, also):
        return change(tree)
    if kind == LEAF:
        return tree
    trail: list[str] = []
    try:
        return _mapped(tree, change, also, trail)
    except RecursionError:
        refuse_circle(tree)
        raise
    except (MemoryConversionError, ValueError) as error:
        if trail:
            say(error, f"at {''.join(reversed(trail))}")
        raise


def _mapped(tree: Any, change: Callable[[Any], Any], also: Any, trail: list[str]) -> Any:
    cls = type(tree)
    node: Node | None = None
    if cls is list or cls is tuple:  # most containers, of which nothing else has to be found out
        children = tree
    elif cls is dict:
        children = list(tree.values())
    else:
        node = opened(tree)
        children = node.children
    changed: list[Any] | None = None
    for i, child in enumerate(children):
        kind = kinds.get(type(child)) or kind_of(child)
        if kind == LEAF and not isinstance(child, also):
            continue
        try:
            new = _mapped(child, change, also, trail) if kind == TREE else change(child)
        except (MemoryConversionError, ValueError):
            trail.append((node or opened(tree)).names(i))
            raise
        if new is not child:
            if changed is None:
                changed = list(children)
            changed[i] = new
    if changed is None:
        return tree
    if node is not None:
        return node.with_children(changed)
    return (
        changed if cls is list else tuple(changed) if cls is tuple else dict(zip(tree, changed, strict=True))
    )


def together(
    trees: Sequence[Any], join: Callable[[Sequence[Any], str], Any], noun: str = "part", where: str = ""
) -> Any:
    """One tree, like the first, of what ``join`` makes of the leaves at the same place in all the trees.

    Args:
        trees: one or more trees that agree. Values of dicts belong together by their keys.
        join: called with the leaves and their place in words; ``""`` where the trees are leaves.
        noun: what a tree is, for messages.
        where: place of these trees in larger ones.

    Raises:
        CannotSplitError: which is a `ValueError`: the trees differ in structure.
    """
    first = trees[0]
    sorts = []
    for tree in trees:
        sorts.append(kinds.get(type(tree)) or kind_of(tree))  # noqa: PERF401  # enters no function
    if TREE not in sorts:
        return join(trees, where)
    root = opened(first)
    rows: list[Sequence[Any]] = []
    for number, (tree, sort) in enumerate(zip(trees, sorts, strict=True)):
        children = _children_like(root, opened(tree)) if sort == sorts[0] else None
        if children is None:
            place = f" at {where}" if where else ""
            raise CannotSplitError(
                f"{noun} 0 came out as {outline(first)}{place}, and {noun} {number} as {outline(tree)};"
                " results of the same structure alone can be joined",
                reason=f"the {noun}s gave different structures",
            )
        rows.append(children)
    return root.with_children(
        [
            together(column, join, noun, where + root.names(i))
            for i, column in enumerate(zip(*rows, strict=True))
        ]
    )


def _children_like(root: Node, node: Node) -> Sequence[Any] | None:
    """The children of ``node`` in the order of those of ``root``; None where the two do not agree."""
    if type(root.tree) is not type(node.tree) or len(root.children) != len(node.children):
        return None
    if root.make is _make_dict:
        found = dict(zip(node.extra, node.children, strict=True))
        return [found[key] for key in root.extra] if found.keys() == set(root.extra) else None
    return node.children if _equal(root.extra, node.extra) else None


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    try:
        return bool(a == b)
    except (TypeError, ValueError, RuntimeError):  # arrays, say, of which some elements differ
        return False


def outline(tree: Any) -> str:
    """The structure of a container in words, without its values."""
    name = type(tree).__name__
    article = "an" if name[0] in "aeiouAEIOU" else "a"
    if isinstance(tree, dict):
        return f"{article} {name} of {', '.join(map(repr, tree)) or 'nothing'}"
    if isinstance(tree, (list, tuple, deque)):
        return f"{article} {name} of {len(tree)}"
    return f"{article} {name}"
