"""What is an array, what is a container to look into, and what is neither; and going through containers.

Looked into are dicts, lists, tuples and deques with their subclasses, named tuples, dataclasses, `UserDict`,
`SimpleNamespace`, and what is registered with optree (in its global namespace or in ``"arraybridge"``). Two
containers agree where their types and their keys, fields or lengths do, dicts whatever the order.
"""

from __future__ import annotations

import copy
import dataclasses
import mmap
import operator
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import numpy as np

from arraybridge.carriers.carrier import carrier_of
from arraybridge.carriers.carrier import opened as opened_carrier
from arraybridge.errors import ArrayNotSupportedError, CannotSplitError, MemoryConversionError, text_of
from arraybridge.frameworks import registry
from arraybridge.frameworks.base import Framework
from arraybridge.frameworks.foreign import foreign_framework, is_foreign_array, offers_alone, unknown_array
from arraybridge.types import Cache

__all__ = [
    "ARRAY",
    "LEAF",
    "TREE",
    "Opened",
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

# -- what a value is -----------------------------------------------------------------------------------

#: What a value is: no array and no container, an array, or a container to look into.
LEAF, ARRAY, TREE = 1, 2, 3
# Each value of the class is looked at anew: it may be registered with optree at any time, or have a protocol
# of its own.
_OPEN = 0

_PLAIN = (
    *(int, float, complex, bool, str, bytes, type(None), slice, range),
    *(FunctionType, BuiltinFunctionType, MethodType),
)
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
        kind = kinds.keep(cls, _kind_of_class(value))
    if kind != _OPEN:
        return kind
    if is_carrier(value):  # first, since zarr's arrays are dataclasses
        return ARRAY
    return TREE if _is_container(value) else ARRAY if offers_alone(value) else LEAF


def _kind_of_class(value: Any) -> int:
    cls = type(value)
    if cls in _PLAIN or isinstance(value, (np.generic, type)):
        return LEAF
    if cls in _BUILT_IN:
        return TREE
    if registry.find_owner(value) is not None:
        return ARRAY
    if carrier_of(value) is not None:
        return _OPEN
    if is_foreign_array(value) and not offers_alone(value):
        return ARRAY
    return TREE if _is_container(value) else _OPEN


def is_carrier(value: Any) -> bool:
    """Whether it counts as an array because it carries one.

    Bytes do not, among other things; they carry one where they are named as the array to convert.
    """
    return not isinstance(value, (bytes, bytearray, mmap.mmap)) and carrier_of(value) is not None


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
        raise unknown_array(x)
    return foreign_framework(x)


# -- one container -------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class Opened:
    """A container, opened. Its children have names: keys, fields or numbers.

    What `flattened` gives has no children: each is opened as well, or None in the place of a leaf.
    """

    cls: type
    #: One to copy, with all that it has besides; None where its class needs none.
    like: Any
    names: Sequence[Any]
    children: Sequence[Any]
    #: What else tells it from others of its class: the bound of a deque, or what optree knows of it.
    extra: Any
    #: Makes one of `like` and other children.
    make: Callable[[Any, Sequence[Any]], Any]
    #: The place of a child in words, as ``[0]`` or ``.image``, by its number.
    place: Callable[[int], str]

    def rebuilt(self, children: Sequence[Any]) -> Any:
        try:
            return self.make(self.like, children)
        except (TypeError, ValueError, AttributeError, LookupError, RuntimeError) as error:  # of its class
            name = self.cls.__qualname__
            raise ArrayNotSupportedError(
                f"a container of type {name} cannot be rebuilt with other arrays ({error}); pass a plain one,"
                " or register its class with optree.register_pytree_node(..., namespace='arraybridge')",
                reason=f"{name} cannot be rebuilt",
            ) from error

    def filled(self, leaves: Iterator[Any]) -> Any:
        """The container with the next of these leaves, of one that `flattened` gave."""
        return self.rebuilt([next(leaves) if one is None else one.filled(leaves) for one in self.children])

    def key(self) -> Any:
        """What tells it from other structures, to be hashed where all that it knows can be."""
        names = tuple(self.names)
        beside = set(getattr(self.like, "__dict__", ())).difference(names) or None  # a set has no hash
        factory = getattr(self.like, "default_factory", None)
        parts = tuple(one and one.key() for one in self.children)
        return self.cls, names, self.extra, factory, beside, parts


def _opened(tree: Any) -> Opened:
    cls, extra, words = type(tree), None, "[{!r}]"
    if cls not in _BUILT_IN and _is_registered(tree):
        return _registered(tree)
    names: Sequence[Any]
    if isinstance(tree, (list, tuple, deque)):
        names, children, extra = range(len(tree)), list(tree), getattr(tree, "maxlen", None)
        make = _with_elements
    elif isinstance(tree, (dict, UserDict)):
        names = list(tree)
        children = [tree[key] for key in names]
        make = partial(_with, operator.setitem, names)
    else:
        fields = (
            vars(tree) if isinstance(tree, SimpleNamespace) else [f.name for f in dataclasses.fields(tree)]
        )
        names, words = [name for name in fields if hasattr(tree, name)], ".{}"
        children = [getattr(tree, name) for name in names]
        make = partial(_with, object.__setattr__, names)  # of frozen ones, too
    return Opened(cls, tree, names, children, extra, make, lambda i: words.format(names[i]))


def _with_elements(like: Any, children: Sequence[Any]) -> Any:
    if isinstance(like, tuple):
        again = tuple.__new__(type(like), children)
        getattr(again, "__dict__", {}).update(getattr(like, "__dict__", {}))
        return again
    copied = copy.copy(like)
    copied.clear()
    copied.extend(children)
    return copied


def _with(put: Callable[..., None], names: Sequence[Any], like: Any, children: Sequence[Any]) -> Any:
    copied = copy.copy(like)
    for name, child in zip(names, children, strict=True):
        put(copied, name, child)
    return copied


def _registered(tree: Any) -> Opened:
    import optree

    one = optree.tree_flatten_one_level(tree, **_OPTREE)
    unflatten, metadata, entries = one.unflatten_func, one.metadata, one.entries
    entry_of, cls, kind = one.path_entry_type, one.type, one.kind  # and not `one`, which holds the children

    def place(i: int) -> str:
        return str(entry_of(entries[i], cls, kind).codify(""))

    def make(_: Any, children: Sequence[Any]) -> Any:
        return unflatten(metadata, tuple(children))

    return Opened(type(tree), None, entries, one.children, metadata, make, place)


# -- going through it ----------------------------------------------------------------------------------

_ENDLESS = "a container contains itself, or is nested too deep to be looked through for arrays"


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
        raise ValueError(_ENDLESS) from None


def _children(tree: Any) -> Iterable[Any]:
    cls = type(tree)
    return tree if cls is list or cls is tuple else tree.values() if cls is dict else _opened(tree).children


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


def map_arrays(tree: Any, change: Callable[[Any], Any], *, also: type | tuple[type, ...] = ()) -> Any:
    """The tree with each array replaced by what ``change`` makes of it; the very object where none changed.

    Containers keep their types, and dictionaries their order. What is no array stays the very object, and so
    does a subclass that does not let itself be rebuilt.

    Args:
        tree: an array, a container, or anything else.
        change: a function of one array.
        also: types of leaves to call it for as well: ``np.generic`` for NumPy's scalars, ``object`` for all.

    Raises:
        MemoryConversionError: of ``change``, with the place of the array, as ``at ['batch'][0].image``.
        ArrayNotSupportedError: a registered class cannot be made of other arrays.
        ValueError: a container contains itself.
    """
    kind = kinds.get(type(tree)) or kind_of(tree)
    if kind != TREE:
        return change(tree) if kind == ARRAY or isinstance(tree, also) else tree
    places: list[str] = []
    try:
        return _mapped(tree, change, also, places)
    except RecursionError:
        raise ValueError(_ENDLESS) from None
    except MemoryConversionError as error:
        if places:
            prefix(error, f"at {''.join(reversed(places))}")
        raise


def _mapped(tree: Any, change: Callable[[Any], Any], also: Any, places: list[str]) -> Any:
    cls = type(tree)
    plain = cls is dict or cls is list or cls is tuple  # most, of which nothing else has to be found out
    opened = None if plain else _opened(tree)
    children = opened.children if opened else tree.values() if cls is dict else tree
    changed: list[Any] | None = None
    for i, child in enumerate(children):
        kind = kinds.get(type(child)) or kind_of(child)
        if kind == LEAF and not isinstance(child, also):
            continue
        try:
            new = _mapped(child, change, also, places) if kind == TREE else change(child)
        except MemoryConversionError:
            places.append((opened or _opened(tree)).place(i))
            raise
        if new is not child:
            changed = list(children) if changed is None else changed
            changed[i] = new
    if changed is None:
        return tree
    if opened is None:
        return dict(zip(tree, changed, strict=True)) if cls is dict else cls(changed)
    try:
        return opened.rebuilt(changed)
    except ArrayNotSupportedError:
        if opened.like is None:
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
    kind_by_tree = (kinds.get(type(tree)) or kind_of(tree) for tree in trees)
    opened = [_opened(tree) if kind == TREE else None for tree, kind in zip(trees, kind_by_tree, strict=True)]
    sorts = [one and (one.cls, set(one.names), one.extra) for one in opened]
    other = next((i for i, sort in enumerate(sorts) if sort != sorts[0]), 0)
    if other:
        at = f" at {place}" if place else ""
        raise CannotSplitError(
            f"{noun} 0 came out as {outline(trees[0])}{at}, and {noun} {other} as {outline(trees[other])};"
            " results of the same structure alone can be joined",
            reason=f"different structures from one {noun} to the next",
        )
    first = opened[0]
    if first is None:
        return join(trees, place)
    rows = [dict(zip(one.names, one.children, strict=True)) for one in opened if one is not None]
    return first.rebuilt(
        [
            together([row[name] for row in rows], join, noun, place + first.place(i))
            for i, name in enumerate(first.names)
        ]
    )


def outline(tree: Any) -> str:
    """The structure of a container in words, without its values."""
    name = type(tree).__name__
    article = "an" if name[0] in "aeiouAEIOU" else "a"
    if isinstance(tree, dict):
        return f"{article} {name} of {', '.join(map(repr, tree)) or 'nothing'}"
    size = f" of {len(tree)}" if isinstance(tree, (list, tuple, deque)) else ""
    return f"{article} {name}{size}"


def flattened(tree: Any) -> tuple[list[Any], Opened]:
    """The leaves of a container, arrays and all else, in order; and the container without them."""
    opened = _opened(tree)
    leaves: list[Any] = []
    structure: list[Opened | None] = []
    for child in opened.children:
        is_container = (kinds.get(type(child)) or kind_of(child)) == TREE
        inner, part = flattened(child) if is_container else ([child], None)
        leaves += inner
        structure.append(part)
    opened.children = structure
    if opened.like is not None:
        with suppress(ArrayNotSupportedError):  # of a class that looks at what it is given
            opened.like = opened.rebuilt([None] * len(structure))
    return leaves, opened
