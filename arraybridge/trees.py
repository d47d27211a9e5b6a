"""Containers: what is an array, what is looked into, and going through it. The only ones in the house.

Looked into are dicts, lists, tuples and deques with their subclasses, named tuples, dataclasses, `UserDict`,
`SimpleNamespace`, and what is registered with optree (in its global namespace or in ``"arraybridge"``). Two
containers agree where their types and their keys, fields or lengths do, dicts whatever the order.
"""

from __future__ import annotations

import copy
import dataclasses
import mmap
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import BuiltinFunctionType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import numpy as np

from arraybridge.carriers.carrier import carrier_of
from arraybridge.carriers.carrier import opened as opened_carrier
from arraybridge.errors import ArrayNotSupportedError, CannotSplitError, MemoryConversionError, text_of
from arraybridge.frameworks import registry
from arraybridge.frameworks.base import Framework
from arraybridge.frameworks.foreign import foreign_framework, is_foreign_array, offers_alone
from arraybridge.types import Cache

__all__ = [
    "ARRAY",
    "LEAF",
    "TREE",
    "Structure",
    "arrays_of",
    "flattened",
    "is_array",
    "is_carrier",
    "kind_of",
    "kinds",
    "leaves_of",
    "map_arrays",
    "outline",
    "prefix",
    "source_of",
    "together",
]

#: What a value is: no array and no container, an array, or a container to look into.
LEAF, ARRAY, TREE = 1, 2, 3
# Each value of the class is looked at anew: it may be registered with optree at any time, or have a protocol
# of its own.
_OPEN = 0

_PLAIN = (
    *(int, float, complex, bool, str, bytes, type(None), slice, range),
    *(FunctionType, BuiltinFunctionType, MethodType),
)
# They carry arrays where they are named as a source; among other things they are what they are.
_BYTES = (bytes, bytearray, mmap.mmap)
_BUILT_IN = (dict, list, tuple, OrderedDict, defaultdict, deque)
_BASES = (dict, list, tuple, deque, UserDict, SimpleNamespace)
# Classes may be registered with optree for arraybridge alone.
_OPTREE: dict[str, Any] = {"none_is_leaf": True, "namespace": "arraybridge"}

#: Type → what its values are. Where every microsecond counts, ``kinds.get(type(x)) or kind_of(x)``.
kinds: Cache[type, int] = Cache()


def kind_of(value: Any) -> int:
    """`LEAF`, `ARRAY` or `TREE`."""
    cls = type(value)
    kind = kinds.get(cls)
    if kind is None:
        if cls in _PLAIN or isinstance(value, (np.generic, type)):
            kind = LEAF
        else:
            kind = TREE if cls in _BUILT_IN else _look(value)
        kinds.keep(cls, kind)
    return kind or _look_again(value)


def _look(value: Any) -> int:
    if registry.find_owner(value) is not None:
        return ARRAY
    if carrier_of(value) is not None:
        return _OPEN
    if is_foreign_array(value) and not offers_alone(value):
        return ARRAY
    return TREE if _is_container(value) else _OPEN


def _look_again(value: Any) -> int:
    if is_carrier(value):  # first, since zarr's arrays are dataclasses
        return ARRAY
    return TREE if _is_container(value) else ARRAY if offers_alone(value) else LEAF


def is_carrier(value: Any) -> bool:
    """Whether it counts as an array because it carries one; bytes do not."""
    return not isinstance(value, _BYTES) and carrier_of(value) is not None


def _is_container(x: Any) -> bool:
    return isinstance(x, _BASES) or dataclasses.is_dataclass(x) or _is_registered(x)


def _is_registered(x: Any) -> bool:
    """Whether optree looks into it: a named tuple, a structseq, or of a class that is registered by now."""
    import optree

    return not optree.tree_is_leaf(x, **_OPTREE)


def is_array(x: Any) -> bool:
    """Whether ``x`` is an array that can be a source."""
    return registry.find_owner(x) is not None or carrier_of(x) is not None or is_foreign_array(x)


def source_of(x: Any) -> tuple[Framework, Any]:
    """The framework of an array, and the array to read (foreign CUDA arrays are imported first).

    Raises:
        UnknownArrayError: it is no array.
    """
    owner = registry.find_owner(x)
    if owner is not None:
        return owner, x
    carrier = carrier_of(x)
    if carrier is not None:
        owner, array = opened_carrier(carrier, x)
        return source_of(array) if owner is None else (owner, array)
    if not is_foreign_array(x):
        raise registry.unknown_array(x)
    return foreign_framework(x)


# -- one container -------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class _Node:
    """A container, opened."""

    like: Any
    #: What tells it from others of its type: keys, fields, the bound of a deque, or what optree knows of it.
    extra: Any
    children: Sequence[Any]
    #: Makes one like it, of `like`, `extra` and other children.
    make: Callable[[Any, Any, Sequence[Any]], Any]
    #: The place of a child in words, as ``[0]`` or ``.image``.
    place: Callable[[int], str]

    def rebuilt(self, children: Sequence[Any]) -> Any:
        try:
            return self.make(self.like, self.extra, children)
        except (TypeError, ValueError, AttributeError, LookupError, RuntimeError) as error:  # of its class
            name = type(self.like).__qualname__
            raise ArrayNotSupportedError(
                f"a container of type {name} cannot be rebuilt with other arrays ({error}); pass a plain one,"
                " or register its class with optree.register_pytree_node(..., namespace='arraybridge')",
                reason=f"{name} cannot be rebuilt",
            ) from error


def _opened(tree: Any) -> _Node:
    if type(tree) not in _BUILT_IN and _is_registered(tree):
        return _registered(tree)
    if isinstance(tree, (dict, UserDict)):
        keys = list(tree)
        return _Node(tree, keys, [tree[key] for key in keys], _with_items, lambda i: f"[{keys[i]!r}]")
    if isinstance(tree, (list, tuple, deque)):
        bound = getattr(tree, "maxlen", None)
        return _Node(tree, bound, list(tree), _with_elements, lambda i: f"[{i}]")
    names = vars(tree) if isinstance(tree, SimpleNamespace) else [f.name for f in dataclasses.fields(tree)]
    fields = [name for name in names if hasattr(tree, name)]
    values = [getattr(tree, name) for name in fields]
    return _Node(tree, fields, values, _with_attributes, lambda i: f".{fields[i]}")


def _with_items(like: Any, keys: list[Any], values: Sequence[Any]) -> Any:
    copied = {} if type(like) is dict else copy.copy(like)  # with its default factory and all it has besides
    for key, value in zip(keys, values, strict=True):
        copied[key] = value
    return copied


def _with_elements(like: Any, _: Any, values: Sequence[Any]) -> Any:
    if isinstance(like, tuple):
        again = tuple.__new__(type(like), values)
        getattr(again, "__dict__", {}).update(getattr(like, "__dict__", {}))
        return again
    copied = copy.copy(like)
    copied.clear()
    copied.extend(values)
    return copied


def _with_attributes(like: Any, names: list[str], values: Sequence[Any]) -> Any:
    copied = copy.copy(like)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(copied, name, value)  # of a frozen dataclass, too
    return copied


def _registered(tree: Any) -> _Node:
    import optree

    one = optree.tree_flatten_one_level(tree, **_OPTREE)
    unflatten = one.unflatten_func

    def place(i: int) -> str:
        return str(one.path_entry_type(one.entries[i], one.type, one.kind).codify(""))

    return _Node(tree, one.metadata, one.children, lambda _, extra, xs: unflatten(extra, tuple(xs)), place)


# -- going through it ----------------------------------------------------------------------------------


def _endless() -> ValueError:
    """What to raise where a container contains itself."""
    return ValueError("a container contains itself, or is nested too deep to be looked through for arrays")


def leaves_of(tree: Any) -> Iterator[Any]:
    """What is no container, arrays and all else, in order.

    Raises:
        ValueError: a container contains itself.
    """
    if (kinds.get(type(tree)) or kind_of(tree)) != TREE:
        yield tree
        return
    cls = type(tree)
    try:
        for child in tree if cls is list or cls is tuple else _opened(tree).children:
            if (kinds.get(type(child)) or kind_of(child)) == TREE:
                yield from leaves_of(child)
            else:
                yield child
    except RecursionError:
        raise _endless() from None


def arrays_of(tree: Any, *, also: type | tuple[type, ...] = ()) -> list[Any]:
    """The arrays in nested containers, and leaves of the types ``also`` (``np.generic``: NumPy's scalars)."""
    return [
        leaf
        for leaf in leaves_of(tree)
        if (kinds.get(type(leaf)) or kind_of(leaf)) == ARRAY or isinstance(leaf, also)
    ]


def prefix(error: Exception, place: str) -> None:
    """Say in the message of an error of ours what it is about; its class and its attributes stay."""
    if isinstance(error, MemoryConversionError):
        error.args = (f"{place}: {text_of(error) or type(error).__name__}",)


def map_arrays(
    tree: Any,
    change: Callable[[Any], Any],
    *,
    also: type | tuple[type, ...] = (),
    say: Callable[[Exception, str], None] = prefix,
) -> Any:
    """The tree with each array replaced by what ``change`` makes of it; the very object where none changed.

    Containers keep their types, and dictionaries their order. What is no array stays the very object, and so
    does a subclass that does not let itself be rebuilt.

    Args:
        tree: an array, a container, or anything else.
        change: a function of one array.
        also: types of leaves to call it for as well, as ``np.generic`` for NumPy's scalars.
        say: puts the place of the array, as ``at ['batch'][0].image``, into an error that ``change`` raises.

    Raises:
        ArrayNotSupportedError: a registered class cannot be made of other arrays.
        ValueError: a container contains itself.
    """
    kind = kinds.get(type(tree)) or kind_of(tree)
    if kind == ARRAY or isinstance(tree, also):
        return change(tree)
    if kind == LEAF:
        return tree
    places: list[str] = []
    try:
        return _mapped(tree, change, also, places)
    except RecursionError as error:
        raise _endless() from error
    except (MemoryConversionError, ValueError) as error:
        if places:
            say(error, f"at {''.join(reversed(places))}")
        raise


def _mapped(tree: Any, change: Callable[[Any], Any], also: Any, places: list[str]) -> Any:
    cls = type(tree)
    node = None
    if cls is list or cls is tuple:  # most containers, of which nothing else has to be found out
        children = tree
    elif cls is dict:
        children = list(tree.values())
    else:
        node = _opened(tree)
        children = node.children
    changed: list[Any] | None = None
    for i, child in enumerate(children):
        kind = kinds.get(type(child)) or kind_of(child)
        if kind == LEAF and not isinstance(child, also):
            continue
        try:
            new = _mapped(child, change, also, places) if kind == TREE else change(child)
        except (MemoryConversionError, ValueError):
            places.append((node or _opened(tree)).place(i))
            raise
        if new is not child:
            changed = list(children) if changed is None else changed
            changed[i] = new
    if changed is None:
        return tree
    if node is None:
        return dict(zip(tree, changed, strict=True)) if cls is dict else cls(changed)
    try:
        return node.rebuilt(changed)
    except ArrayNotSupportedError:
        if _is_registered(tree):
            raise
        return tree


def together(
    trees: Sequence[Any], join: Callable[[Sequence[Any], str], Any], noun: str = "part", place: str = ""
) -> Any:
    """One tree, like the first, of what ``join`` makes of the leaves at the same place in all the trees.

    ``join`` is called with the leaves and their place in words, ``""`` where the trees are leaves. Values of
    dicts belong together by their keys. ``noun`` says what a tree is, and ``place`` where in larger ones.

    Raises:
        CannotSplitError: which is a `ValueError`: the trees differ in structure.
    """
    sorts = [kinds.get(type(tree)) or kind_of(tree) for tree in trees]
    if TREE not in sorts:
        return join(trees, place)
    first = trees[0]
    root = _opened(first) if sorts[0] == TREE else None
    rows = [_children_like(root, tree, sort) for tree, sort in zip(trees, sorts, strict=True)]
    different = [number for number, children in enumerate(rows) if children is None]
    if root is None or different:
        other = different[0] or sorts.index(TREE)
        at = f" at {place}" if place else ""
        raise CannotSplitError(
            f"{noun} 0 came out as {outline(first)}{at}, and {noun} {other} as {outline(trees[other])};"
            " results of the same structure alone can be joined",
            reason=f"different structures from one {noun} to the next",
        )
    columns = zip(*(children or () for children in rows), strict=True)
    return root.rebuilt([together(c, join, noun, place + root.place(i)) for i, c in enumerate(columns)])


def _children_like(root: _Node | None, tree: Any, kind: int) -> Sequence[Any] | None:
    """The children of a container in the order of those of ``root``; None where the two do not agree."""
    if root is None or kind != TREE or type(root.like) is not type(tree):
        return None
    node = _opened(tree)
    if root.make is _with_items:
        by_key = dict(zip(node.extra, node.children, strict=True))
        return [by_key[key] for key in root.extra] if by_key.keys() == set(root.extra) else None
    same = len(root.children) == len(node.children) and root.extra == node.extra
    return node.children if same else None


def outline(tree: Any) -> str:
    """The structure of a container in words, without its values."""
    name = type(tree).__name__
    article = "an" if name[0] in "aeiouAEIOU" else "a"
    if isinstance(tree, dict):
        return f"{article} {name} of {', '.join(map(repr, tree)) or 'nothing'}"
    size = f" of {len(tree)}" if isinstance(tree, (list, tuple, deque)) else ""
    return f"{article} {name}{size}"


# -- containers without what they hold -----------------------------------------------------------------


class Structure:
    """A container without what it holds; of a leaf, nothing but the place of one."""

    __slots__ = ("_children", "_node")

    def __init__(self, node: _Node | None, children: Sequence[Structure]) -> None:
        self._node, self._children = node, children

    def filled(self, leaves: Iterator[Any]) -> Any:
        """The container with the next of these leaves, in the order of `leaves_of`."""
        if self._node is None:
            return next(leaves)
        return self._node.rebuilt([child.filled(leaves) for child in self._children])

    def key(self) -> Any:
        """What tells it from other structures, to be hashed where all that it knows can be."""
        if self._node is None:
            return None
        extra, like = self._node.extra, self._node.like
        names = extra if isinstance(extra, list) else []
        beside = not isinstance(like, type) and set(getattr(like, "__dict__", ())).difference(names)
        return (
            like if isinstance(like, type) else type(like),
            tuple(extra) if isinstance(extra, list) else extra,
            getattr(like, "default_factory", None),
            [like] if beside else None,
            tuple(child.key() for child in self._children),
        )


def flattened(tree: Any) -> tuple[list[Any], Structure]:
    """The leaves of a container, arrays and all else, and what to fill with such leaves again."""
    if (kinds.get(type(tree)) or kind_of(tree)) != TREE:
        return [tree], Structure(None, ())
    node = _opened(tree)
    parts = [flattened(child) for child in node.children]
    if node.make not in (_with_items, _with_elements, _with_attributes):
        node.like = type(tree)
    else:
        with suppress(ArrayNotSupportedError):  # of a class that looks at what it is given
            node.like = node.rebuilt([None] * len(parts))
    node.children = ()
    return [leaf for leaves, _ in parts for leaf in leaves], Structure(node, [one for _, one in parts])
