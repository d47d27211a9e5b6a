"""Kinds of values (arrays, containers, leaves), and traversal of containers.

Containers are dicts, lists, tuples and deques (and subclasses of these), named tuples, dataclasses, attrs
classes, pydantic models, `UserDict`, `SimpleNamespace`, other mappings that can be rebuilt from a dict, and
classes that are registered with optree (in its global namespace or in ``"arraybridge"``), JAX or PyTorch.
Models and other callable objects are not containers.
Two containers have the same structure if their types and their keys, fields or lengths are equal. The order
of dict keys does not matter.
"""

from __future__ import annotations

import copy
import dataclasses
import mmap
import reprlib
from abc import ABC, abstractmethod
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence, ValuesView
from collections.abc import Set as AbstractSet
from contextlib import suppress
from enum import Enum, IntEnum
from functools import cached_property
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from arraybridge.caches import exact_key, new_cache, recall, remember
from arraybridge.carriers.registry import carrier_of
from arraybridge.carriers.third_party_arrays import is_protocol_producer, offers_on_instance
from arraybridge.errors import ArrayNotSupportedError, CannotSplitError, MemoryConversionError
from arraybridge.interface import registry
from arraybridge.interface.framework import Framework
from arraybridge.interface.installation import package_of
from arraybridge.interface.runtime import Pytree
from arraybridge.outcome import ask

# -- kinds of values -----------------------------------------------------------------------------------


class Kind(IntEnum):
    """The kind of the values of a class."""

    #: Each value is inspected: its class may be registered with optree at any time, and the value may have an
    #: array protocol that its class does not have. This member is 0, so that
    #: ``kinds.get(type(x)) or kind_of(x)`` calls `kind_of` for it.
    DEPENDS = 0
    #: Neither an array nor a container.
    LEAF = 1
    ARRAY = 2
    #: A container that is traversed.
    TREE = 3


# These are globals because access to a member of an enum takes 50 ns in Python 3.11. Compare them with `is`,
# which takes 21 ns, instead of `==`, which takes 24 ns.
_DEPENDS = Kind.DEPENDS
LEAF = Kind.LEAF
ARRAY = Kind.ARRAY
TREE = Kind.TREE

_PLAIN = (
    *(int, float, complex, bool, str, bytes, type(None), slice, range),
    *(FunctionType, BuiltinFunctionType, MethodType),
)
# Bytes are leaves in containers and arguments, but `convert_memory(b)` converts them.
_BYTES = (bytes, bytearray, mmap.mmap)
_HOLDERS = (OrderedDict, dict, list, tuple, deque)
_BUILT_IN = (*_HOLDERS, defaultdict)
_CONTAINERS = (*_HOLDERS, UserDict, SimpleNamespace)
# Mappings of these packages are not containers. They hold files or labeled arrays: reading one may read a
# file, and it cannot be rebuilt from a dict without losing metadata.
_FILE_MAPPINGS = ("h5py", "xarray", "zarr", "shelve", "dbm")
# The abstract base classes of collections of other objects.
_COLLECTIONS = (Mapping, Sequence, AbstractSet, ValuesView)
_MODEL_PACKAGES = ("torch", "equinox", "flax")
# With these options, optree also finds classes that are registered in the namespace of arraybridge.
_OPTREE: dict[str, Any] = {"none_is_leaf": True, "namespace": "arraybridge"}

#: The cached results of `_kind_of_class`.
_kinds_of_classes: dict[type, Kind] = new_cache()
#: Type → kind of its values. On the fast path, use ``kinds.get(type(x)) or kind_of(x)``: the first part alone
#: is None for a class that is not cached yet, and `DEPENDS` if the values have to be inspected.
kinds: dict[type, Kind] = new_cache()


def cached_kind(cls: type) -> Kind | None:
    """Return the cached kind of the values of a class; None if there is none, or the class is unhashable."""
    try:
        return kinds.get(cls)
    except TypeError:
        return None


def kind_of(value: Any) -> Kind:
    """Return `LEAF`, `ARRAY` or `TREE`; `LEAF` for an object that raises when it is inspected."""
    try:
        cls = type(value)
        try:
            kind = kinds[cls]
        except (KeyError, TypeError):  # not cached yet, or unhashable
            kind = None
        if kind is None:
            kind = remember(kinds, cls, _kind_of_all(value))
        return _kind_of_one(value) if kind is _DEPENDS else kind
    except (RecursionError, MemoryError, MemoryConversionError):  # the last one means a broken framework
        raise
    except Exception:  # noqa: BLE001  # attributes of third-party objects may raise anything
        return LEAF


def _kind_of_all(value: Any) -> Kind:
    """Return the kind of all values of the class of ``value``; `DEPENDS` if their kinds may differ."""
    cls = type(value)
    if cls in _PLAIN or isinstance(value, (np.generic, type)):
        return LEAF
    if cls in _BUILT_IN:
        return TREE
    if registry.find_owner(value) is not None:
        return ARRAY
    if carrier_of(value) is not None:
        return _DEPENDS
    if is_protocol_producer(value) and not offers_on_instance(value):
        return ARRAY
    return TREE if _is_container(value) else _DEPENDS


def _kind_of_one(value: Any) -> Kind:
    """Return the kind of a value whose class does not determine its kind."""
    if carrier_of(value) is not None and not isinstance(value, _BYTES):
        return ARRAY  # checked first, since zarr arrays are dataclasses
    if _is_container(value):
        return TREE
    return ARRAY if offers_on_instance(value) else LEAF


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
    """Return whether ``x`` is a mapping that can be rebuilt from a dict, such as a ``MappingProxyType``.

    `_kind_of_class` caches the answer, because this function constructs an empty mapping.
    """
    if not issubclass(type(x), Mapping) or package_of(type(x)) in _FILE_MAPPINGS:
        return False

    def rebuild() -> type:
        for name in x.keys():  # noqa: SIM118  # the iterator of some mappings yields other objects
            x[name]
            break
        make: Any = type(x)
        return type(make({}))

    return ask(rebuild) is type(x)


def _is_container(x: Any) -> bool:
    cls = type(x)
    kind = recall(_kinds_of_classes, cls)
    if kind is None:
        kind = remember(_kinds_of_classes, cls, _kind_of_class(x))
    if kind is not _DEPENDS:
        return kind is TREE
    return is_registered(x) or _pytree_of(x) is not None


def _kind_of_class(x: Any) -> Kind:
    """Return `TREE` or `LEAF` if all objects of the class of ``x`` are of that kind; otherwise `DEPENDS`."""
    cls = type(x)
    if callable(x) or _is_model(cls) or issubclass(cls, Enum):
        return LEAF
    # isinstance is not used, because an object may claim another class, such as Mock(spec=dict).
    if issubclass(cls, _CONTAINERS) or _field_names(cls) is not None or _is_mapping(x):
        return TREE
    return _DEPENDS


def _is_model(cls: type) -> bool:
    """Return whether a class is a ``Module`` of PyTorch, Equinox or Flax, even one without ``__call__``."""
    return any(base.__name__ == "Module" and package_of(base) in _MODEL_PACKAGES for base in cls.__mro__)


def _pytree_of(x: Any) -> Pytree | None:
    """Return the pytree of an object whose class is registered with a loaded framework, otherwise None."""
    for framework in registry.list_loaded_cached():
        pytree = framework.runtime.open_pytree(x)
        if pytree is not None:
            return pytree
    return None


def is_registered(x: Any) -> bool:
    """Return whether optree traverses ``x``: a named tuple, structseq, or object of a registered class."""
    import optree

    return not optree.tree_is_leaf(x, **_OPTREE)


# -- one container -------------------------------------------------------------------------------------


#: Exceptions that classes may raise if they do not accept the new children.
_CLASS_ERRORS = (TypeError, ValueError, AttributeError, LookupError, RuntimeError, AssertionError)


class Container(ABC):
    """One level of a container: its children, and a method that rebuilds it with other children.

    Attributes:
        tree: The container.
        names: The keys, field names or numbers of the children.
        children: The values in the container.
        extra: Other state that containers of the same structure have in common, such as the
            ``maxlen`` of a deque.
    """

    __slots__ = ("children", "extra", "names", "tree")

    def __init__(self, tree: Any, names: Sequence[Any], children: Sequence[Any], extra: Any = None) -> None:
        self.tree = tree
        self.names = names
        self.children = children
        self.extra = extra

    def place(self, i: int) -> str:
        """Return the Python expression that accesses a child, such as ``[0]`` or ``.image``."""
        return f"[{self.names[i]!r}]"

    def rebuild(self, children: Sequence[Any]) -> Any:
        """Return a container like this one with other children.

        A list also accepts another number of items. They precede its fields, if it has any.

        Raises:
            ArrayNotSupportedError: The class of the container does not accept the children.
        """
        try:
            return self._make(children)
        except _CLASS_ERRORS as error:
            name = type(self.tree).__qualname__
            raise ArrayNotSupportedError(
                f"Cannot rebuild a container of type {name} with other arrays. Its class does not accept"
                " them.",
                reason=f"{name} cannot be rebuilt",
                advice="Pass its arrays in a tuple or dict, or register the class with"
                " optree.register_pytree_node(..., namespace='arraybridge').",
            ) from error

    def structure(self) -> tuple[Any, ...]:
        """Return the properties that are equal for containers of the same structure."""
        return type(self.tree), set(self.names), self.extra

    @abstractmethod
    def _make(self, children: Sequence[Any]) -> Any:
        """Return a container like this one with other children; the container's class may raise errors."""


def open_container(tree: Any) -> Container:
    """Return one level of a container, as an instance of the `Container` subclass for its class.

    The items of a subclass of dict, list, tuple or deque are read with the methods of the built-in class,
    even if the subclass overrides them. Objects of classes registered with optree are flattened by optree.
    """
    if type(tree) not in _BUILT_IN and is_registered(tree):
        return _OptreeNode(tree)
    base = _base_of(tree)
    names = None if type(tree) in _BUILT_IN else _field_names(type(tree))
    # This includes mappings with fields, because their class may not accept a dict.
    if base is not None or _has_fields(tree, names):
        return _Object(tree, base, names or [])
    # A class that JAX or PyTorch knows as a pytree may not accept a dict of its items, such as TensorDict
    # (tensordict 0.15).
    pytree = _pytree_of(tree)
    return _Mapping(tree) if pytree is None else _PytreeNode(tree, pytree)


def _has_fields(tree: Any, names: list[str] | None) -> bool:
    """Return whether the children of an object are its fields, with these names, which can be replaced.

    They cannot if the object stores them elsewhere, as a pytree of JAX or PyTorch may do: the tensorclass of
    tensordict 0.15.
    """
    if names is None:
        return issubclass(type(tree), SimpleNamespace)
    name = names[0] if names else ""
    is_in_slot = isinstance(getattr(type(tree), name, None), MemberDescriptorType)
    return not name or is_in_slot or name in _attributes(tree) or _pytree_of(tree) is None


class _Field(NamedTuple):
    """The name of a field of a dataclass that also has items."""

    name: str

    def __str__(self) -> str:
        return self.name


class _Object(Container):
    """An object with items, fields or both.

    Items are those of a dict, list, tuple, deque, ``UserDict`` or an instance of a subclass. Fields are those
    of a dataclass, an attrs class, a pydantic model or a ``SimpleNamespace``. If an object has both, the
    fields follow the items, except for those that refer to an array or a container among the items.
    `_restore_attributes` updates these together with the item.
    """

    __slots__ = ("_base", "_item_count")

    def __init__(self, tree: Any, base: Any, names: list[str]) -> None:
        self._base = base
        items = {} if base is None else _items_of(tree, base)
        self._item_count = len(items)
        fields: dict[Any, Any] = {} if type(tree) in _BUILT_IN else _fields_of(tree, names)
        if fields and base is not None:
            attributes = _attributes(tree)
            of_items = {id(item) for item in items.values() if kind_of(item) is not LEAF}
            fields = {
                _Field(name): value
                for name, value in fields.items()
                if id(attributes.get(name)) not in of_items
            }
        children = [*items.values(), *fields.values()]
        super().__init__(tree, [*items, *fields], children, tree.maxlen if base is deque else None)

    @property
    def has_items(self) -> bool:
        """Whether the object is a built-in container, a ``UserDict`` or an instance of a subclass."""
        return self._base is not None

    def place(self, i: int) -> str:
        return super().place(i) if i < self._item_count else f".{self.names[i]}"

    def _make(self, children: Sequence[Any]) -> Any:
        base = self._base
        fields = self.names[self._item_count :]
        count = len(children) - len(fields)
        rebuilt: Any
        if base is tuple:
            rebuilt = tuple.__new__(type(self.tree), children[:count])
            _attributes(rebuilt).update(_attributes(self.tree))
        else:
            rebuilt = _copy_of(self.tree, base)
            if base is not None:
                _replace_items(rebuilt, base, self.names, children[:count])
        extras = _extras(rebuilt) if fields else {}
        for name, value in zip(fields, children[count:], strict=True):
            if name in extras:
                extras[name] = value
            else:
                object.__setattr__(rebuilt, str(name), value)  # works for frozen dataclasses, too
        if base is None:
            _forget_computed(rebuilt)
        elif len(children) == len(self.children):
            _restore_attributes(self, rebuilt, children)
        return rebuilt


class _Mapping(Container):
    """A mapping other than a dict, whose class accepts a dict."""

    __slots__ = ()

    def __init__(self, tree: Mapping[Any, Any]) -> None:
        names = list(tree.keys())  # the iterator of some mappings yields other objects
        super().__init__(tree, names, [tree[name] for name in names])

    def _make(self, children: Sequence[Any]) -> Any:
        rebuilt = type(self.tree)(dict(zip(self.names, children, strict=True)))
        if list(rebuilt.keys()) != self.names:
            raise TypeError("the class does not accept a dict of its items")
        return rebuilt


class _OptreeNode(Container):
    """A named tuple, a structseq, or an object whose class is registered with optree."""

    __slots__ = ("_node",)

    def __init__(self, tree: Any) -> None:
        import optree

        self._node = node = optree.tree_flatten_one_level(tree, **_OPTREE)
        super().__init__(tree, node.entries, node.children, node.metadata)

    def place(self, i: int) -> str:
        node = self._node
        return str(node.path_entry_type(node.entries[i], node.type, node.kind).codify(""))

    @property
    def is_named_tuple(self) -> bool:
        """Whether the container is a named tuple whose class is not registered."""
        import optree

        return self._node.kind is optree.PyTreeKind.NAMEDTUPLE

    def _make(self, children: Sequence[Any]) -> Any:
        rebuilt = self._node.unflatten_func(self._node.metadata, tuple(children))
        attributes = _attributes(self.tree)
        if attributes and self.is_named_tuple:
            # Arrays and containers that the constructor has set are kept, because it may have computed them
            # from the fields. All other attributes are copied from the original.
            own = _attributes(rebuilt)
            own.update({k: v for k, v in attributes.items() if k not in own or kind_of(v) is LEAF})
            _restore_attributes(self, rebuilt, children)
        return rebuilt


class _PytreeNode(Container):
    """An object whose class is registered as a pytree with PyTorch or JAX."""

    __slots__ = ("_pytree",)

    def __init__(self, tree: Any, pytree: Pytree) -> None:
        self._pytree = pytree
        super().__init__(tree, range(len(pytree.children)), pytree.children, pytree.structure)

    def place(self, i: int) -> str:
        return self._pytree.places[i]

    def _make(self, children: Sequence[Any]) -> Any:
        return self._pytree.rebuild(children)


def own_attributes(opened: Container) -> dict[str, Any]:
    """Return the attributes of a container that are neither children nor computed from them.

    Those of a mapping or a registered class are covered by its constructor or registration.
    """
    tree = opened.tree
    has_attributes = isinstance(opened, _Object) or (
        isinstance(opened, _OptreeNode) and opened.is_named_tuple
    )
    if not has_attributes or type(tree) in _BUILT_IN:
        return {}
    children = {(str(name), id(child)) for name, child in zip(opened.names, opened.children, strict=True)}
    holder = _holder_of(tree)
    attributes = _attributes(tree) | (
        _slots(tree) if isinstance(opened, _Object) and opened.has_items else {}
    )
    return {
        name: value
        for name, value in attributes.items()
        if (name, id(value)) not in children
        and value is not holder
        and not isinstance(getattr(type(tree), str(name), None), cached_property)
    }


# -- items and attributes of a container ---------------------------------------------------------------


def _holder_of(tree: Any) -> Any:
    """Return the object that holds the items: the container itself, or the data of a ``UserDict``."""
    if type(tree) in _BUILT_IN:
        return tree
    # issubclass() of an abstract base class raises for an unhashable class.
    return tree.data if UserDict in type(tree).__mro__ else tree


def _base_of(tree: Any) -> Any:
    """Return the built-in class whose methods read and write the items; None without such a class."""
    cls = type(_holder_of(tree))
    for base in _HOLDERS:
        if issubclass(cls, base):
            return base
    return None


def _items_of(tree: Any, base: Any) -> dict[Any, Any]:
    """Return the items of a container by key or number, read with the methods of its built-in class."""
    holder = _holder_of(tree)
    return dict(base.items(holder) if issubclass(base, dict) else enumerate(base.__iter__(holder)))


def _replace_items(tree: Any, base: Any, names: Sequence[Any], items: Sequence[Any]) -> None:
    """Replace the items of a container with the methods of its built-in class."""
    holder = _holder_of(tree)
    if issubclass(base, dict):
        for name, item in zip(names, items, strict=False):
            base.__setitem__(holder, name, item)
    else:
        base.clear(holder)
        base.extend(holder, items)


def _fields_of(tree: Any, names: list[str]) -> dict[str, Any]:
    """Return the fields that a dataclass, attrs class, pydantic model or ``SimpleNamespace`` has set."""
    if issubclass(type(tree), SimpleNamespace):
        names = list(vars(tree))
    return {name: getattr(tree, name) for name in names if hasattr(tree, name)} | _extras(tree)


def _copy_of(tree: Any, base: Any) -> Any:
    """Return a shallow copy of a container, never the container itself."""
    if issubclass(type(tree), _HOLDERS) and not _defines_copying(type(tree)):
        return _bare_copy(tree, base)  # copy.copy would call the constructor, or overridden item methods
    rebuilt = copy.copy(tree)
    return _bare_copy(tree, base) if rebuilt is tree else rebuilt


_COPYING = ("__copy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__")


def _defines_copying(cls: type) -> bool:
    own = [one for one in cls.__mro__ if one.__module__ not in ("builtins", "collections")]
    return any(name in vars(one) for one in own for name in _COPYING)


def _bare_copy(tree: Any, base: Any) -> Any:
    """Return a shallow copy without calling methods of the class, such as its constructor or ``__copy__``."""
    rebuilt: Any = (base or object).__new__(type(tree))
    if base is deque:
        deque.__init__(rebuilt, (), tree.maxlen)
    if issubclass(type(tree), defaultdict):
        defaultdict.__init__(rebuilt, tree.default_factory)
    _attributes(rebuilt).update(_attributes(tree))
    for name, value in _slots(tree).items():
        object.__setattr__(rebuilt, name, value)
    return rebuilt


def _extras(tree: Any) -> dict[str, Any]:
    """Return the extra fields of a pydantic model with ``extra="allow"``; an empty dict for other objects."""
    # Pydantic dataclasses have __pydantic_fields__, but not __pydantic_extra__.
    is_pydantic = getattr(type(tree), "__pydantic_fields__", None) is not None
    extras = getattr(tree, "__pydantic_extra__", None) if is_pydantic else None
    return extras if isinstance(extras, dict) else {}


def _restore_attributes(opened: Container, rebuilt: Any, children: Sequence[Any]) -> None:
    """Update attributes of a rebuilt container that refer to old items, and delete cached properties."""
    attributes = _attributes(rebuilt)
    if _attributes(opened.tree) is opened.tree:  # the items of the container are its attributes
        rebuilt.__dict__ = rebuilt
    elif attributes:  # some attributes may refer to an item, as in Hugging Face's ModelOutput
        pairs = zip(opened.children, children, strict=True)
        by_id = {id(old): new for old, new in pairs if kind_of(old) is not LEAF}
        attributes.update({name: by_id[id(old)] for name, old in attributes.items() if id(old) in by_id})
    _forget_computed(rebuilt)


def _forget_computed(rebuilt: Any) -> None:
    """Delete the cached values of each ``cached_property``, because they depend on the old arrays."""
    attributes = _attributes(rebuilt)
    for name in list(attributes):
        if isinstance(getattr(type(rebuilt), str(name), None), cached_property):
            del attributes[name]


def _slots(x: Any) -> dict[str, Any]:
    """Return the values in the ``__slots__`` of an object, by name."""
    members = ((name, member) for cls in type(x).__mro__ for name, member in vars(cls).items())
    names = [name for name, member in members if isinstance(member, MemberDescriptorType)]
    return {name: getattr(x, name) for name in names if hasattr(x, name)}


def _attributes(x: Any) -> dict[str, Any]:
    """Return the ``__dict__`` of ``x`` without calling its ``__getattr__``; an empty dict if it has none."""
    try:
        attributes: dict[str, Any] = object.__getattribute__(x, "__dict__")
    except AttributeError:
        return {}
    return attributes


# -- traversal -----------------------------------------------------------------------------------------


def leaves_of(tree: Any) -> list[Any]:
    """Return all values in nested containers that are not containers, in order.

    Raises:
        ValueError: If a container contains itself.
    """
    return arrays_of(tree, also=object)


def arrays_of(tree: Any, *, also: type | tuple[type, ...] = ()) -> list[Any]:
    """Return the arrays in nested containers, and leaves of the types ``also``, such as ``np.generic``."""
    arrays: list[Any] = []

    def collect(x: Any) -> Any:
        arrays.append(x)
        return x

    map_arrays(tree, collect, also=also)
    return arrays


def arrays_with_owners(tree: Any) -> list[tuple[Framework, Any]]:
    """Return the arrays of frameworks in nested containers, each with its framework."""
    arrays = (tree,) if cached_kind(type(tree)) is ARRAY else arrays_of(tree)
    pairs = [(registry.find_owner(x), x) for x in arrays]
    return [(owner, x) for owner, x in pairs if owner is not None]


def has_array_inside(x: Any) -> bool:
    """Return whether a collection that is not traversed as a container, such as a set, has array items.

    Attributes of objects and iterators are not inspected.
    """
    return bool(ask(_has_array_inside, x))  # ``x`` may contain itself


def _has_array_inside(x: Any) -> bool:
    is_collection = issubclass(type(x), _COLLECTIONS) and type(x) not in _PLAIN
    if not is_collection or kind_of(x) is ARRAY or callable(x):  # callable objects are models
        return False
    items = list(x.values() if issubclass(type(x), Mapping) else x)
    leaves = [leaf for item in items for leaf in leaves_of(item)]
    return any(kind_of(leaf) is ARRAY or has_array_inside(leaf) for leaf in leaves)


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves of a container, in order, and the container with None in their places.

    If a class in the container does not accept None, some or all leaves stay in place.
    """
    leaves = leaves_of(tree)
    with suppress(ArrayNotSupportedError):  # a named tuple or a registered class does not accept None
        tree = map_arrays(tree, lambda _: None, also=object, rebuild_all=True)
    return leaves, tree


def fill(structure: Any, leaves: Iterator[Any]) -> Any:
    """Return a structure from `flatten`, filled with the next leaves of an iterator."""
    return map_arrays(structure, lambda _: next(leaves), also=object, rebuild_all=True)


def key_of(structure: Any) -> Any:
    """Return a key of the structure of a container. The key may be unhashable.

    Containers with equal keys have the same structure, and their leaves are in the same order. A dict with
    its keys in another order has a different key.
    """
    cls = type(structure)
    if kind_of(structure) is not TREE:
        return None
    if cls is tuple or cls is list:  # most containers, for which no `Container` is needed
        return cls, *map(key_of, structure)
    opened = open_container(structure)
    names = tuple(map(exact_key, opened.names))
    # Other attributes may have any meaning, so the key must not be cached: a set makes it unhashable.
    lists_children = isinstance(opened, _OptreeNode) and not opened.is_named_tuple
    others = set() if lists_children else set(_attributes(structure)) - {*opened.names}
    factory = structure.default_factory if isinstance(structure, defaultdict) else None
    return type(structure), names, opened.extra, factory, others or None, tuple(map(key_of, opened.children))


def map_arrays(
    tree: Any,
    change: Callable[[Any], Any],
    *,
    also: type | tuple[type, ...] = (),
    rebuild_all: bool = False,
    is_whole: Callable[[Any], bool] | None = None,
) -> Any:
    """Return a tree in which each array is replaced by the result of ``change``.

    Containers keep their types, and dicts their order. If nothing changed, the result is the same object. A
    container that cannot be rebuilt is left unchanged, with its arrays, unless it is a named tuple or its
    class is registered with optree; then an error is raised.

    Args:
        tree: An array, a container, or any other value.
        change: A function of one array.
        also: Types of leaves for which ``change`` is also called: ``np.generic`` for NumPy scalars,
            ``object`` for all leaves.
        rebuild_all: Whether to rebuild containers even if nothing in them changes.
        is_whole: Returns whether ``change`` is called with a container instead of its contents. Defaults to
            None: never.

    Raises:
        MemoryConversionError: If ``change`` raises it. The place of the array is added, such as
            ``at ['batch'][0].image``.
        ArrayNotSupportedError: If a named tuple or an object registered with optree cannot be rebuilt.
        ValueError: If a container contains itself.
    """
    try:
        kind = kinds.get(type(tree)) or kind_of(tree)
    except TypeError:  # its class is unhashable
        kind = kind_of(tree)
    if kind is not TREE:
        return change(tree) if kind is ARRAY or issubclass(type(tree), also) else tree
    if is_whole is not None and is_whole(tree):
        return change(tree)
    cls = type(tree)
    opened: Container | None = None
    children: Any
    try:
        # Most containers are of these classes, for which no `Container` is needed.
        if cls is dict:
            children = tree.values()
        elif cls is list or cls is tuple:
            children = tree
        else:
            opened = open_container(tree)
            children = opened.children
        changed = list(children) if rebuild_all else None
        for i, child in enumerate(children):
            try:
                kind = kinds.get(type(child)) or kind_of(child)
            except TypeError:  # its class is unhashable
                kind = kind_of(child)
            if kind is LEAF and not issubclass(type(child), also):
                continue
            try:
                if kind is TREE:
                    new = map_arrays(child, change, also=also, rebuild_all=rebuild_all, is_whole=is_whole)
                else:
                    new = change(child)
            except MemoryConversionError as error:
                error.add_path((opened or open_container(tree)).place(i))
                raise
            if new is not child:
                changed = list(children) if changed is None else changed
                changed[i] = new
    except RecursionError:
        raise cyclic_error() from None
    if changed is None:
        return tree
    if opened is None:
        return dict(zip(tree, changed, strict=True)) if cls is dict else cls(changed)
    return _rebuild(opened, changed)


def cyclic_error() -> ValueError:
    """Return the error for a container that contains itself, or that is nested too deeply."""
    return ValueError(
        "Cannot search a container for arrays. It contains itself, or it is nested too deeply. Pass its"
        " arrays in a flat list or dict."
    )


def _rebuild(opened: Container, children: list[Any]) -> Any:
    """Return a container with other children; the unchanged container if its class does not accept them.

    Raises:
        ArrayNotSupportedError: If a named tuple, or an object registered with optree, cannot be rebuilt.
    """
    try:
        return opened.rebuild(children)
    except ArrayNotSupportedError:
        if is_registered(opened.tree):
            raise
        return opened.tree


def together(
    trees: Sequence[Any], join: Callable[[Sequence[Any], str], Any], noun: str = "part", place: str = ""
) -> Any:
    """Return a tree like the first one, with the joined leaves of all trees at each position.

    Values of dicts are joined by key.

    Args:
        trees: The trees.
        join: A function that is called with the leaves at one place and with the place, such as
            ``"['batch'][0]"``. The place is ``""`` if the trees are leaves.
        noun: The word for a tree in messages.
        place: The place of the trees in larger trees.

    Raises:
        CannotSplitError: If the trees differ in structure.
    """
    opened = [open_container(tree) if kind_of(tree) is TREE else None for tree in trees]
    layouts = [one and one.structure() for one in opened]
    # The index of the first tree whose structure differs from that of tree 0; 0 if all are equal.
    other = next((i for i, layout in enumerate(layouts) if layout != layouts[0]), 0)
    if other:
        at = f" at {place}" if place else ""
        raise CannotSplitError(
            f"The results cannot be joined, because the structures of {noun} 0 and {noun} {other} differ{at}"
            f" ({difference(trees[0], trees[other])}).",
            reason=f"the structures of {noun} 0 and {noun} {other} differ",
            advice="Return the same structure from every call.",
        )
    first = opened[0]
    if first is None:
        return join(trees, place)
    rows = [dict(zip(one.names, one.children, strict=True)) for one in opened if one is not None]
    children = [
        together([row[name] for row in rows], join, noun, place + first.place(i))
        for i, name in enumerate(first.names)
    ]
    return first.rebuild(children)


def pair_arrays(tree: Any, other: Any, place: str = "") -> Iterator[tuple[Any, Any, str]]:
    """Yield each array of a tree with the value at the same place of another tree, and the place.

    Containers at the same place may be of different types, such as a dict and a dataclass.

    Raises:
        ValueError: If their keys differ, or only the other tree has an array or a container at a place.
    """
    kind = kind_of(tree)
    if kind is ARRAY and other is not None:
        yield tree, other, place
        return
    other_kind = kind_of(other)
    if kind is LEAF and other_kind is LEAF:
        return
    opened = open_container(tree) if kind is TREE else None
    others = open_container(other) if other_kind is TREE else None
    if opened is None or others is None or set(opened.names) != set(others.names):
        at = f" at {place}" if place else ""
        raise ValueError(
            f"The structure of out differs from that of the tree{at} ({difference(tree, other)}). Pass"
            " containers with the same keys."
        )
    counterparts = dict(zip(others.names, others.children, strict=True))
    for i, (name, child) in enumerate(zip(opened.names, opened.children, strict=True)):
        yield from pair_arrays(child, counterparts[name], place + opened.place(i))


def outline(tree: Any) -> str:
    """Return a short description of the structure of a container, such as ``"a list of 3"``."""
    name = type(tree).__name__
    article = "an" if name[0] in "aeiouAEIOU" else "a"
    if isinstance(tree, dict):
        return f"{article} {name} of {', '.join(map(repr, tree)) or 'nothing'}"
    size = f" of {len(tree)}" if isinstance(tree, (list, tuple, deque)) else ""
    return f"{article} {name}{size}"


def difference(first: Any, second: Any) -> str:
    """Describe how the structures of two values differ, such as ``a list of 2 and a list of 3``."""
    one, other = outline(first), outline(second)
    if one != other:
        return f"{one} and {other}"
    if type(first) is not type(second):
        names = [f"{type(x).__module__}.{type(x).__qualname__}" for x in (first, second)]
        if names[0] == names[1]:
            return f"{one} of two different classes with the name {names[0]}"
        return f"{one} of two classes: {' and '.join(names)}"
    opened = open_container(first), open_container(second)
    only_one = {str(name) for name in set(opened[0].names) ^ set(opened[1].names)}
    if only_one:
        return f"{one}, of which only one has {', '.join(sorted(only_one))}"
    return " and ".join(f"{one} with {reprlib.repr(x.extra)}" for x in opened)
