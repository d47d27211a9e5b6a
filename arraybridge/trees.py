"""What is an array, what is a container to look into, and what is neither; and going through containers.

Containers are dicts, lists, tuples and deques with their subclasses, named tuples, dataclasses, attrs
classes, pydantic models, `UserDict`, `SimpleNamespace`, other mappings that can be rebuilt from a dict, and
classes that are registered with optree (in its global namespace or in ``"arraybridge"``), JAX or PyTorch.
Models and other callable objects are not containers.
Two containers agree if their types and their keys, fields or lengths do, dicts regardless of order.
"""

from __future__ import annotations

import copy
import dataclasses
import mmap
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence, ValuesView
from contextlib import suppress
from enum import Enum
from functools import cached_property
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np

from arraybridge.carriers.registry import carrier_of
from arraybridge.errors import ArrayNotSupportedError, CannotSplitError, MemoryConversionError
from arraybridge.frameworks import registry
from arraybridge.frameworks.base import Pytree
from arraybridge.frameworks.foreign import is_foreign_array, offers_alone
from arraybridge.types import exact_key, new_cache, remember

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
_HOLDERS = (OrderedDict, dict, list, tuple, deque)
_BUILT_IN = (*_HOLDERS, defaultdict)
_CONTAINERS = (*_HOLDERS, UserDict, SimpleNamespace)
# Mappings of these packages hold files or labeled arrays: reading one may read a file, and a dict has no
# metadata.
_FILE_MAPPINGS = ("h5py", "xarray", "zarr", "shelve", "dbm")
# Classes that declare themselves as collections of other objects.
_COLLECTIONS = (Mapping, Sequence, ValuesView)
_MODEL_PACKAGES = ("torch", "equinox", "flax")
# Classes may be registered with optree for arraybridge alone.
_OPTREE: dict[str, Any] = {"none_is_leaf": True, "namespace": "arraybridge"}

#: The answers of `_kind_of_class`.
_kinds_of_classes: dict[type, int] = new_cache()
#: Type → what its values are. Where every microsecond counts, ``kinds.get(type(x)) or kind_of(x)``.
kinds: dict[type, int] = new_cache()


def kind_of(value: Any) -> int:
    """`LEAF`, `ARRAY` or `TREE`; `LEAF` for an object that raises when it is inspected."""
    try:
        return _kind_of(value)
    except (RecursionError, MemoryError, MemoryConversionError):  # the last: its framework is broken
        raise
    except Exception:  # noqa: BLE001  # of the object's own attributes: an unrelated object breaks no call
        return LEAF


def _kind_of(value: Any) -> int:
    cls = type(value)
    kind = kinds.get(cls)
    if kind is None:
        if cls in _PLAIN or isinstance(value, (np.generic, type)):
            kind = LEAF
        elif cls in _BUILT_IN:
            kind = TREE
        elif registry.find_owner(value) is not None:
            kind = ARRAY
        elif carrier_of(value) is not None:
            kind = _OPEN
        elif is_foreign_array(value) and not offers_alone(value):
            kind = ARRAY
        else:
            kind = TREE if _is_container(value) else _OPEN
        remember(kinds, cls, kind)
    if kind != _OPEN:
        return kind
    # Bytes are no arrays among others; they carry one where they are named as the array to convert.
    if carrier_of(value) is not None and not isinstance(value, (bytes, bytearray, mmap.mmap)):
        return ARRAY  # first, since zarr's arrays are dataclasses
    return TREE if _is_container(value) else ARRAY if offers_alone(value) else LEAF


def _field_names(cls: type) -> list[str] | None:
    """Return the field names of a dataclass, an attrs class or a pydantic model; None for other classes."""
    if dataclasses.is_dataclass(cls):
        return [field.name for field in dataclasses.fields(cls)]
    attributes = getattr(cls, "__attrs_attrs__", None)
    if attributes is not None:
        return [attribute.name for attribute in attributes]
    fields = getattr(cls, "__pydantic_fields__", None)
    return list(fields) if isinstance(fields, dict) else None


def _is_mapping(x: Any) -> bool:
    """Return whether this is a mapping that can be rebuilt from a dict, such as a ``MappingProxyType``."""
    if not issubclass(type(x), Mapping) or type(x).__module__.partition(".")[0] in _FILE_MAPPINGS:
        return False
    try:
        make: Any = type(x)
        return type(make({})) is make
    except Exception:  # noqa: BLE001  # a constructor of another library may raise anything
        return False


def _is_container(x: Any) -> bool:
    cls = type(x)
    kind = _kinds_of_classes.get(cls)
    if kind is None:
        kind = remember(_kinds_of_classes, cls, _kind_of_class(x))
    if kind != _OPEN:
        return kind == TREE
    return is_registered(x) or _pytree_of(x) is not None


def _kind_of_class(x: Any) -> int:
    """Return whether every object of the class of ``x`` is a container, none is, or registrations decide."""
    cls = type(x)
    if callable(x) or _is_model(cls) or issubclass(cls, Enum):
        return LEAF
    # Not isinstance: an object may claim another class, such as Mock(spec=dict).
    if issubclass(cls, _CONTAINERS) or _field_names(cls) is not None or _is_mapping(x):
        return TREE
    return _OPEN


def _is_model(cls: type) -> bool:
    """Return whether this is a ``Module`` of PyTorch, Equinox or Flax, also one without ``__call__``."""
    return any(
        base.__name__ == "Module" and base.__module__.partition(".")[0] in _MODEL_PACKAGES
        for base in cls.__mro__
    )


def _pytree_of(x: Any) -> Pytree | None:
    """Open an object whose class is registered as a pytree with a framework that is loaded."""
    for framework in registry.loaded_now():
        pytree = framework.runtime.open_pytree(x)
        if pytree is not None:
            return pytree
    return None


def is_registered(x: Any) -> bool:
    """Whether optree looks into it: a named tuple, a structseq, or of a class that is registered by now."""
    import optree

    return not optree.tree_is_leaf(x, **_OPTREE)


# -- one container -------------------------------------------------------------------------------------


class _Opened(NamedTuple):
    """A container, opened. Its children have names: keys, fields or numbers."""

    names: Sequence[Any]
    children: Sequence[Any]
    #: What else tells it from others of its class: the bound of a deque, or what optree knows of it.
    extra: Any
    #: Makes one like it of other children.
    make: Callable[[Sequence[Any]], Any]
    #: The place of a child in words, as ``[0]`` or ``.image``, by its number.
    place: Callable[[int], str]


def open_container(tree: Any) -> _Opened:
    """A container, opened by the methods of the built-in class, whatever its own make of an item."""
    if type(tree) not in _BUILT_IN and is_registered(tree):
        return _registered(tree)
    holder, base = _holder_of(tree)
    if base is None:
        cls = type(tree)
        if _is_mapping(tree):
            return _opened_mapping(tree)
        if not issubclass(cls, SimpleNamespace) and _field_names(cls) is None:
            return _opened_pytree(tree)
        fields = list(vars(tree)) if issubclass(cls, SimpleNamespace) else _field_names(cls) or []
        contents: dict[Any, Any] = {name: getattr(tree, name) for name in fields if hasattr(tree, name)}
        contents.update(_extras(tree))
    elif base in (dict, OrderedDict):
        contents = dict(base.items(holder))
    else:
        contents = dict(enumerate(base.__iter__(holder)))
    names, words = list(contents), ".{}" if base is None else "[{!r}]"
    opened_children = list(contents.values())

    def make(children: Sequence[Any]) -> Any:
        again: Any = tuple.__new__(type(tree), children) if base is tuple else _copied(tree, base)
        holder, _ = _holder_of(again)
        if base is tuple:
            _attributes(again).update(_attributes(tree))
        elif base in (list, deque):
            base.clear(holder)
            base.extend(holder, children)
        else:
            put: Any = getattr(base, "__setitem__", object.__setattr__)  # also of a frozen dataclass
            extras = _extras(again)
            for name, child in zip(names, children, strict=True):
                if base is None and name in extras:
                    extras[name] = child
                else:
                    put(holder, name, child)
        if _attributes(tree) is tree:  # items that are attributes too
            again.__dict__ = again
        elif base is not None:  # attributes that refer to an item, as those of Hugging Face's ModelOutput
            _replace_attributes(again, opened_children, children)
        for name in [*_attributes(again)]:
            if isinstance(getattr(type(tree), str(name), None), cached_property):  # computed of other arrays
                del _attributes(again)[name]
        return again

    bound = tree.maxlen if isinstance(tree, deque) else None
    return _Opened(names, opened_children, bound, make, lambda i: words.format(names[i]))


def _copied(tree: Any, base: Any) -> Any:
    """Return a shallow copy of a container, never the container itself."""
    try:
        again = copy.copy(tree)
    except Exception:
        # The class may refuse to be copied. If it does not say how, only its own way to set an item failed.
        if base is None or _defines_copying(type(tree)):
            raise
        return _bare_copy(tree, base)
    return _bare_copy(tree, base) if again is tree else again


def _defines_copying(cls: type) -> bool:
    own = [one for one in cls.__mro__ if one.__module__ not in ("builtins", "collections")]
    return any(name in vars(one) for one in own for name in ("__copy__", "__reduce__", "__reduce_ex__"))


def _bare_copy(tree: Any, base: Any) -> Any:
    """Return a copy that is made without calling the class, such as one whose ``__copy__`` returns itself."""
    root = object if base is None or issubclass(type(tree), UserDict) else base
    again: Any = root.__new__(type(tree))
    if base is deque and root is deque:
        deque.__init__(again, (), tree.maxlen)
    if issubclass(type(tree), defaultdict):
        defaultdict.__init__(again, tree.default_factory)
    _attributes(again).update(_attributes(tree))
    for cls in type(tree).__mro__:
        for name, member in vars(cls).items():
            if isinstance(member, MemberDescriptorType) and hasattr(tree, name):
                object.__setattr__(again, name, getattr(tree, name))
    if issubclass(type(tree), UserDict):
        again.data = copy.copy(tree.data)
    return again


def _extras(tree: Any) -> dict[str, Any]:
    """Return the extra fields of a pydantic model with ``extra="allow"``; an empty dict for other objects."""
    extras = getattr(type(tree), "__pydantic_fields__", None) is not None and tree.__pydantic_extra__
    return extras if isinstance(extras, dict) else {}


def _replace_attributes(again: Any, before: Sequence[Any], after: Sequence[Any]) -> None:
    """Let attributes that are one of the items before refer to the item after."""
    attributes = _attributes(again)
    if not attributes:
        return
    by_id = {id(old): new for old, new in zip(before, after, strict=True) if kind_of(old) != LEAF}
    for name, value in list(attributes.items()):
        if id(value) in by_id:
            attributes[name] = by_id[id(value)]


def _opened_mapping(tree: Mapping[Any, Any]) -> _Opened:
    """Open a mapping that is neither a dict nor a ``UserDict``."""
    names = list(tree)

    def make(children: Sequence[Any]) -> Any:
        make_mapping: Any = type(tree)
        return make_mapping(dict(zip(names, children, strict=True)))

    return _Opened(names, [tree[name] for name in names], None, make, lambda i: f"[{names[i]!r}]")


def _opened_pytree(tree: Any) -> _Opened:
    """Open an object whose class is registered as a pytree with PyTorch or JAX."""
    pytree = _pytree_of(tree)
    if pytree is None:  # its registration was removed meanwhile
        return _Opened((), (), None, lambda _: tree, str)
    names = range(len(pytree.children))
    return _Opened(names, pytree.children, pytree.structure, pytree.rebuild, lambda i: pytree.places[i])


def _holder_of(tree: Any) -> tuple[Any, Any]:
    """What holds the items, and the built-in class whose methods read and write them; of attributes None."""
    holder = tree.data if issubclass(type(tree), UserDict) else tree
    return holder, next((one for one in _HOLDERS if issubclass(type(holder), one)), None)


def _attributes(x: Any) -> dict[str, Any]:
    """What ``x`` has as attributes besides, without its own ``__getattr__``."""
    with suppress(AttributeError):
        return cast("dict[str, Any]", object.__getattribute__(x, "__dict__"))
    return {}


def _registered(tree: Any) -> _Opened:
    import optree

    one = optree.tree_flatten_one_level(tree, **_OPTREE)

    def make(children: Sequence[Any]) -> Any:
        return one.unflatten_func(one.metadata, tuple(children))

    def place(i: int) -> str:
        return str(one.path_entry_type(one.entries[i], one.type, one.kind).codify(""))

    return _Opened(one.entries, one.children, one.metadata, make, place)


def rebuilt(tree: Any, opened: _Opened, children: Sequence[Any]) -> Any:
    """A container with other children."""
    try:
        return opened.make(children)
    except (TypeError, ValueError, AttributeError, LookupError, RuntimeError) as error:  # of its class
        name = type(tree).__qualname__
        raise ArrayNotSupportedError(
            f"Cannot rebuild a container of type {name} with other arrays. Its class does not accept them.",
            reason=f"{name} cannot be rebuilt",
            advice="Pass its arrays in a tuple or dict, or register the class with"
            " optree.register_pytree_node(..., namespace='arraybridge').",
        ) from error


# -- going through it ----------------------------------------------------------------------------------


def leaves_of(tree: Any) -> list[Any]:
    """What is no container, arrays and all else, in order.

    Raises:
        ValueError: a container contains itself.
    """
    return arrays_of(tree, also=object)


def arrays_of(tree: Any, *, also: type | tuple[type, ...] = ()) -> list[Any]:
    """The arrays in nested containers, and leaves of the types ``also`` (``np.generic``: NumPy's scalars)."""
    arrays: list[Any] = []

    def collect(x: Any) -> Any:
        arrays.append(x)
        return x

    map_arrays(tree, collect, also=also)
    return arrays


def has_array_inside(x: Any) -> bool:
    """Return whether a collection that is not a container here, such as a set, has arrays as items.

    Attributes of objects and iterators are not inspected.
    """
    is_collection = isinstance(x, _COLLECTIONS) and type(x) not in _PLAIN
    if not is_collection or kind_of(x) == ARRAY or callable(x):  # callable objects are models
        return False
    try:
        items = list(x.values() if isinstance(x, Mapping) else x)
        leaves = [leaf for item in items for leaf in leaves_of(item)]
        return any(kind_of(leaf) == ARRAY or has_array_inside(leaf) for leaf in leaves)
    except Exception:  # noqa: BLE001  # of the collection's own methods, or of one that contains itself
        return False


def flattened(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of a container, in order, and the container with None in their places."""
    leaves = leaves_of(tree)
    with suppress(ArrayNotSupportedError):  # of a class that looks at what it is made of
        tree = map_arrays(tree, lambda _: None, also=object, anew=True)
    return leaves, tree


def filled(structure: Any, leaves: Iterator[Any]) -> Any:
    """The container with the next of these leaves in their places, of one that `flattened` gave."""
    return map_arrays(structure, lambda _: next(leaves), also=object, anew=True)


def key_of(structure: Any) -> Any:
    """What tells a container from those of other structures, to be hashed where all of that can be."""
    if kind_of(structure) != TREE:
        return None
    opened = open_container(structure)
    names = tuple(map(exact_key, opened.names))
    # Attributes beside the items: nobody knows what they mean, and a set has no hash.
    beside = set() if is_registered(structure) else set(_attributes(structure)) - {*opened.names}
    factory = structure.default_factory if isinstance(structure, defaultdict) else None
    return type(structure), names, opened.extra, factory, beside or None, tuple(map(key_of, opened.children))


def map_arrays(
    tree: Any, change: Callable[[Any], Any], *, also: type | tuple[type, ...] = (), anew: bool = False
) -> Any:
    """The tree with each array replaced by what ``change`` makes of it; the very object where none changed.

    Containers keep their types, and dictionaries their order. What is no array stays the very object, and so
    does a subclass that does not let itself be rebuilt.

    Args:
        tree: an array, a container, or anything else.
        change: a function of one array.
        also: types of leaves to call it for as well: ``np.generic`` for NumPy's scalars, ``object`` for all.
        anew: make containers anew, also where nothing in them changes.

    Raises:
        MemoryConversionError: of ``change``, with the place of the array, as ``at ['batch'][0].image``.
        ArrayNotSupportedError: a registered class cannot be made of other arrays.
        ValueError: a container contains itself.
    """
    kind = kinds.get(type(tree)) or kind_of(tree)
    if kind != TREE:
        return change(tree) if kind == ARRAY or issubclass(type(tree), also) else tree
    places: list[str] = []
    try:
        return _mapped(tree, change, also, places, anew)
    except RecursionError:
        raise ValueError(
            "a container contains itself, or is nested too deep to be looked through for arrays"
        ) from None
    except MemoryConversionError as error:
        if places:
            error.add_path("".join(reversed(places)))
        raise


def _mapped(tree: Any, change: Callable[[Any], Any], also: Any, places: list[str], anew: bool) -> Any:
    cls = type(tree)
    plain = cls is dict or cls is list or cls is tuple  # most, of which nothing else has to be found out
    opened = None if plain else open_container(tree)
    children = opened.children if opened else tree.values() if cls is dict else tree
    changed = list(children) if anew else None
    for i, child in enumerate(children):
        kind = kinds.get(type(child)) or kind_of(child)
        if kind == LEAF and not issubclass(type(child), also):
            continue
        try:
            new = _mapped(child, change, also, places, anew) if kind == TREE else change(child)
        except MemoryConversionError:
            places.append((opened or open_container(tree)).place(i))
            raise
        if new is not child:
            changed = list(children) if changed is None else changed
            changed[i] = new
    if changed is None:
        return tree
    if opened is None:
        return dict(zip(tree, changed, strict=True)) if cls is dict else cls(changed)
    try:
        return rebuilt(tree, opened, changed)
    except ArrayNotSupportedError:
        if is_registered(tree):
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
    opened = [open_container(tree) if kind_of(tree) == TREE else None for tree in trees]
    sorts = [one and (type(tree), set(one.names), one.extra) for tree, one in zip(trees, opened, strict=True)]
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
    children = [
        together([row[name] for row in rows], join, noun, place + first.place(i))
        for i, name in enumerate(first.names)
    ]
    return rebuilt(trees[0], first, children)


def outline(tree: Any) -> str:
    """The structure of a container in words, without its values."""
    name = type(tree).__name__
    article = "an" if name[0] in "aeiouAEIOU" else "a"
    if isinstance(tree, dict):
        return f"{article} {name} of {', '.join(map(repr, tree)) or 'nothing'}"
    size = f" of {len(tree)}" if isinstance(tree, (list, tuple, deque)) else ""
    return f"{article} {name}{size}"


def attributes_beside(tree: Any, opened: _Opened) -> dict[str, Any]:
    """Return the attributes of a container that are neither its children nor computed from them."""
    children = {id(child) for child in opened.children}
    holder, _ = _holder_of(tree)
    return {
        name: value
        for name, value in _attributes(tree).items()
        if name not in opened.names
        and value is not holder
        and id(value) not in children
        and not isinstance(getattr(type(tree), str(name), None), cached_property)
    }


def map_children(tree: Any, change: Callable[[Any, str], Any]) -> Any:
    """Return a container with each child replaced by ``change(child, place)``.

    If no child changed, the result is the same object.

    A place is written as in Python: ``[0]``, ``['batch']`` or ``.image``.
    """
    opened = open_container(tree)
    children = [change(child, opened.place(i)) for i, child in enumerate(opened.children)]
    if all(new is old for new, old in zip(children, opened.children, strict=True)):
        return tree
    try:
        return rebuilt(tree, opened, children)
    except ArrayNotSupportedError:
        if is_registered(tree):
            raise
        return tree  # as in `map_arrays`
