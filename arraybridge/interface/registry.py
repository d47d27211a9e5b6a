"""The registry of frameworks, by name and by array type. It imports a framework only when it is needed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

from arraybridge.caches import empty_caches, new_cache, remember
from arraybridge.compilers import run_eagerly
from arraybridge.device import Device
from arraybridge.errors import FrameworkNotInstalledError, UnknownFrameworkError, error_text, nearest, warn
from arraybridge.formatting import one_of
from arraybridge.hooks import hooks
from arraybridge.interface.autodiff import Autodiff
from arraybridge.interface.component import Component, component
from arraybridge.interface.framework import Framework
from arraybridge.interface.installation import can_find, how_to_install, is_imported, package_of, packages_of
from arraybridge.interface.metadata import BUILT_IN, FrameworkMetadata
from arraybridge.interface.missing_gpu import find_device_or_host
from arraybridge.interface.sparse import SparseArrays
from arraybridge.interface.streams import Streams
from arraybridge.types import FrameworkLike
from arraybridge.validation import add_hints, bool_option

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = [
    "BUILT_IN",
    "FrameworkMetadata",
    "find_owner",
    "framework",
    "framework_name",
    "framework_names",
    "instances",
    "is_installed",
    "load_or_none",
    "loaded",
    "metadata_of",
    "names_by_module",
    "numpy_like_names",
    "register",
    "unregister",
    "version_of",
]

#: The entry-point group in which other packages provide frameworks: ``name = "package.module:Class"``.
GROUP = "arraybridge.frameworks"
#: The package from which plug-ins import the base classes.
_INTERFACE = "arraybridge.interface"

_instances: dict[str, Framework] = {}
# Names of frameworks that failed to load. Only `framework`, which is called with a name, tries to load them
# again.
_failed: set[str] = set()
# The framework of each array type; None for types whose objects no framework owns, such as those of carriers.
_owners: dict[type, Framework | None] = new_cache()


# -- metadata ------------------------------------------------------------------------------------------


def version_of(name: str) -> str:
    """Return the installed version of a framework without importing it; ``""`` if it is not installed."""
    from importlib.metadata import distributions  # costs 20 ms

    candidates = metadata_of(name).distributions
    return next(
        (distribution.version for candidate in candidates for distribution in distributions(name=candidate)),
        "",
    )


@cache
def _plugins() -> dict[str, EntryPoint]:
    """Return the entry points of other packages by framework name, without loading them."""
    from importlib.metadata import entry_points  # costs 20 ms; only unknown names and types need it

    return {point.name: point for point in entry_points(group=GROUP) if point.name not in BUILT_IN}


def metadata_of(name: str) -> FrameworkMetadata:
    """Return the metadata of a framework without importing it.

    >>> metadata_of("jax").modules
    ('jax', 'jaxlib')
    """
    if name in _instances:
        return _metadata_of(_instances[name])
    if name in BUILT_IN or name not in _plugins():
        return BUILT_IN.get(name) or FrameworkMetadata(name)
    point = _plugins()[name]
    distributions = () if point.dist is None else (point.dist.name,)
    return FrameworkMetadata(name, packages=(point.module.partition(".")[0],), distributions=distributions)


def _metadata_of(framework: Framework) -> FrameworkMetadata:
    metadata = framework.runtime.metadata or BUILT_IN.get(framework.name)
    return metadata or FrameworkMetadata(framework.name, modules=framework.modules)


def framework_names() -> list[str]:
    """Return the names of all known frameworks: built in, registered, or provided by an installed package."""
    return list(dict.fromkeys((*BUILT_IN, *_instances, *_plugins())))


def numpy_like_names() -> list[str]:
    """Return the names of frameworks whose arrays NumPy code can process, the most similar to NumPy first."""
    return [name for name in framework_names() if metadata_of(name).runs_numpy_code]


@cache
def names_by_module() -> dict[str, tuple[str, ...]]:
    """Return the names of frameworks by the top-level module of their array classes.

    This mapping identifies the framework of an array without imports.
    """
    names: dict[str, tuple[str, ...]] = {}
    for one in (*BUILT_IN.values(), *map(_metadata_of, _instances.values())):
        for root in (module.partition(".")[0] for module in one.modules):
            names[root] = tuple(dict.fromkeys((*names.get(root, ()), one.name)))
    return names


# -- adding frameworks ---------------------------------------------------------------------------------


@add_hints
def register(framework: Framework, *, replace: bool = False) -> Framework:
    """Add a framework and return it.

    A name can be registered once, as in the pytree registries of PyTorch and JAX. Another call raises, even
    with the same instance or another instance of the same class. Pass ``replace=True`` in a notebook cell,
    test fixture or module that may run again. A package that provides the name through an entry point may
    also register it when it is imported.

    Args:
        framework: An instance of a subclass of `Framework`.
        replace: Whether to replace a framework of the same name. Defaults to False.

    Returns:
        The same instance.

    Raises:
        TypeError: If ``framework`` is not such an instance, or has no name, or if ``replace`` is not a bool.
        ValueError: If the name exists and ``replace`` is false, if the class lacks required methods or
            ``modules``, or if it does not assign its components as in ``memory = component(MyMemory)``.

    Example:
        >>> import numpy as np
        >>> class MyArray:  # a class from another library
        ...     def __init__(self, values):
        ...         self.values = values
        ...         self.shape, self.dtype, self.nbytes = values.shape, values.dtype, values.nbytes
        >>> class MyFramework(Framework):
        ...     name = "mine"
        ...     modules = (MyArray.__module__.partition(".")[0],)  # the package of the class
        ...     def owns(self, x):
        ...         return isinstance(x, MyArray)
        ...     def host_view(self, x):
        ...         return x.values
        ...     def from_host(self, view, device):
        ...         return MyArray(view)
        >>> _ = register(MyFramework())
        >>> import arraybridge
        >>> arraybridge.to_torch(MyArray(np.ones(2)))
        tensor([1., 1.], dtype=torch.float64)
        >>> unregister("mine")
    """
    if not isinstance(framework, Framework):
        raise not_an_instance_error("register", framework, Framework)
    bool_option("replace", replace)
    name: object = getattr(framework, "name", None)
    if not isinstance(name, str) or not name:
        raise TypeError(
            f"Cannot register {type(framework).__name__}: it has no name."
            " Set the class attribute 'name' to a non-empty string."
        )
    if not replace and _instances.get(name) is framework:
        raise ValueError(
            f"Cannot register {type(framework).__name__}: it is already registered as {name!r}. Remove this"
            f" call, since framework({name!r}) returns it, or pass replace=True."
        )
    holder = "" if replace else _holder_of(name, type(framework))
    if holder:
        raise ValueError(
            f"Cannot register {type(framework).__name__}: the name {name!r} belongs to {holder}."
            " Choose another name, or pass replace=True to replace that framework."
        )
    _check_components(framework)
    missing = _missing_parts(framework)
    if missing:
        raise ValueError(
            f"Cannot register {type(framework).__name__}: it lacks {' and '.join(missing)}."
            " Define these in the class; see arraybridge.Framework."
        )
    _instances[framework.name] = framework
    _clear_caches()
    return framework


def not_an_instance_error(function: str, x: object, base: type) -> TypeError:
    """Return the error for a function that registers instances of ``base`` but received another object."""
    is_subclass = isinstance(x, type) and issubclass(x, base) and x is not base
    got = f"the class {x.__name__}" if isinstance(x, type) else f"an object of type {type(x).__name__}"
    example = x.__name__ if is_subclass and isinstance(x, type) else f"My{base.__name__}"
    return TypeError(
        f"{function}() expected an instance of a subclass of {base.__name__}, got {got}."
        f" Pass an instance, as in {function}({example}())."
    )


def _holder_of(name: str, cls: type[Framework]) -> str:
    """Return a description of the framework that already has a name; ``""`` if ``cls`` may use the name."""
    if name in BUILT_IN:
        return "a built-in framework"
    if name in _instances:
        return f"a registered {type(_instances[name]).__name__}"
    point = _plugins().get(name)
    if point is None or point.module.partition(".")[0] == package_of(cls):
        return ""
    package = point.module if point.dist is None else point.dist.name
    return f"the installed package {package}"


def _check_components(framework: Framework) -> None:
    """Raise if a component has the wrong type, which would otherwise fail only later, in a conversion."""
    from inspect import getattr_static  # only registrations need it

    bases = {name: one.cls for name, one in vars(Framework).items() if isinstance(one, component)}
    for name, base in {**bases, "streams": Streams, "autodiff": Autodiff, "sparse": SparseArrays}.items():
        assigned = getattr_static(framework, name)
        if isinstance(assigned, component):  # created on first access
            value: Any = assigned.cls
            is_right = isinstance(value, type) and issubclass(value, base)
        else:
            value = getattr(framework, name)
            is_right = isinstance(value, base) and getattr(value, "framework", framework) is framework
        if not is_right:
            problem = _wrong_component(name, value, base)
            raise ValueError(f"Cannot register {type(framework).__name__}: {problem}")


def _wrong_component(name: str, value: Any, base: type) -> str:
    """Return the message for a component of the wrong kind, with the correct assignment."""
    is_class = isinstance(value, type)
    cls = value if is_class else type(value)
    kind = f"the class {cls.__qualname__}" if is_class else f"of type {cls.__qualname__}"
    is_derived = issubclass(cls, base)
    own = cls.__name__ if is_derived else f"My{base.__name__}"
    derive = "Write" if is_derived else f"Derive {own} from {base.__name__} and write"
    imported = [] if is_derived else [base.__name__]
    fix = f"{name} = {own}()"
    if issubclass(base, Component):
        imported.append("component")
        fix = f"{name} = component({own})"
    imports = f" Import with: from {_INTERFACE} import {', '.join(imported)}." if imported else ""
    return f"its attribute {name!r} is {kind}. {derive} {fix}.{imports}"


def _missing_parts(framework: Framework) -> list[str]:
    """Return descriptions of the required attributes that a framework lacks.

    If its first module has ``from_dlpack``, no method is required, because the defaults use DLPack.
    """
    cls = type(framework)
    modules = framework.runtime.metadata.modules if framework.runtime.metadata else framework.modules
    if isinstance(modules, str) or not modules or not all(isinstance(one, str) for one in modules):
        return ["modules (a tuple of package names)"]
    missing = []
    has_dlpack = hasattr(sys.modules.get(modules[0]), "from_dlpack")
    if cls.from_host is Framework.from_host and not has_dlpack:
        missing.append(f"from_host (the module {modules[0]} has no from_dlpack)")
    reads = (cls.host_view, cls.to_host) != (Framework.host_view, Framework.to_host)
    if not reads and not has_dlpack:
        missing.append("host_view or to_host")
    return missing


def unregister(name: str) -> None:
    """Remove a registered framework. Built-in frameworks and entry points can still be found afterwards.

    Args:
        name: The name of the framework.

    Raises:
        UnknownFrameworkError: If no framework of that name is registered.
    """
    if _instances.pop(name, None) is None:
        raise UnknownFrameworkError(f"No framework is registered as {name!r}.")
    _clear_caches()


def _clear_caches() -> None:
    """Clear the caches of types, devices and calls that depend on the set of frameworks."""
    names_by_module.cache_clear()
    empty_caches()


def instances() -> dict[str, Framework]:
    """Return the frameworks that are imported or registered, by name."""
    return dict(_instances)


# -- lookup by name ------------------------------------------------------------------------------------


def framework_name(name: FrameworkLike, option: str = "") -> str:
    """Return the plain name of a framework, without importing it.

    Args:
        name: The name, such as ``"torch"``, or a `MemoryType` member.
        option: The name of the option that has this value, for error messages. Defaults to no name.

    Returns:
        The name as a plain string.

    Raises:
        UnknownFrameworkError: If no framework has that name. The message lists the names and the nearest one.
        TypeError: If ``name`` is not a string.
    """
    if not isinstance(name, str):
        expected = f"{option} expects a framework name" if option else "Expected a framework name"
        raise TypeError(
            f"{expected}, got {type(name).__name__}. Pass a string such as 'torch', or a MemoryType member."
        )
    plain = str(name)
    if plain in BUILT_IN or plain in _instances or plain in _plugins():
        return plain
    names = framework_names()
    nicknamed = [one.name for one in BUILT_IN.values() if plain.lower() in one.nicknames]
    suggestion = f" (did you mean {nicknamed[0]!r}?)" if nicknamed else nearest(plain, names)
    by_keyword = ""
    if plain.lower().rstrip(":0123456789") in ("cpu", "gpu", "cuda", "rocm", "mps", "xpu", "tpu", "opencl"):
        by_keyword = " To select a device, pass it by keyword, as in device='cpu' or gpu_id=0."
    named = f"{option}={plain!r}" if option else repr(plain)
    raise UnknownFrameworkError(
        f"{named} is not a known framework{suggestion}. Pass {one_of(names)}.{by_keyword}"
    )


def framework(name: FrameworkLike) -> Framework:
    """Return the framework with this name, and import its package if necessary.

    Args:
        name: The name, such as ``"torch"``, or a `MemoryType` member.

    Returns:
        The instance of `Framework` that converts its arrays.

    Raises:
        UnknownFrameworkError: If no framework has that name. The message lists the names and the nearest one.
        FrameworkNotInstalledError: If the package is not installed, or its import fails.
        TypeError: If ``name`` is not a string.

    Example:
        >>> framework("numpy").name
        'numpy'
    """
    ready = _instances.get(name) if isinstance(name, str) else None
    return ready if ready is not None else _load(framework_name(name))


@run_eagerly
def _load(name: str) -> Framework:
    """Import a built-in framework or a framework from another package, and return its instance."""
    is_first = not is_imported(*metadata_of(name).packages)
    try:
        with hooks.start_up(name) if is_first else nullcontext():
            offered = _class_of(name) if name in BUILT_IN else _plugins()[name].load()
            instance = offered if isinstance(offered, Framework) else offered()
        if not isinstance(instance, Framework):
            raise TypeError(f"{offered!r} is not a subclass of Framework")
        if instance.name != name:
            raise TypeError(f"its class has the name {instance.name!r}, not {name!r}")
        if name not in BUILT_IN and name not in _instances:
            return register(instance, replace=True)  # its entry point has already claimed the name
    except FrameworkNotInstalledError:
        raise
    except (Exception, SystemExit) as error:  # third-party code may raise anything
        raise _not_loaded_error(metadata_of(name), error) from error
    return _instances.setdefault(name, instance)


def _class_of(name: str) -> Callable[[], Framework]:
    """Import and return the class of a built-in framework, or the function that creates the framework."""
    module = importlib.import_module(f"arraybridge.frameworks.{name}.framework")
    make: Callable[[], Framework] = getattr(module, BUILT_IN[name].factory)
    return make


def _not_loaded_error(metadata: FrameworkMetadata, error: BaseException) -> FrameworkNotInstalledError:
    """Return the error for a framework whose import raised, with advice."""
    name = metadata.name
    is_missing = isinstance(error, ModuleNotFoundError) and (
        (error.name or "").partition(".")[0] in metadata.packages
    )
    if name not in BUILT_IN:
        package = metadata.distributions[0]
        problem = (
            f"{name} is provided by the package {package}, whose entry point"
            f" {name} = {_plugins()[name].value} in the group {GROUP} fails to load: {error_text(error)}."
        )
        update = f"pip install --upgrade {package}"
        advice = f"Update that package with {update}, or uninstall it with pip uninstall {package}."
    elif is_missing or not is_installed(name):
        problem = f"{name} is not installed."
        advice = f"Run {how_to_install(metadata)}."
    else:
        problem = f"{name} is installed, but importing it failed: {error_text(error)}."
        advice = f"Reinstall it with {how_to_install(metadata, '--force-reinstall')}."
    return FrameworkNotInstalledError(problem, target_type=name, reason=error_text(error), advice=advice)


def is_installed(name: str) -> bool:
    """Return whether the package of a framework can be found, without importing it."""
    if name not in BUILT_IN:
        return name in _instances or name in _plugins()
    return any(can_find(package) for package in BUILT_IN[name].packages)


def loaded(name: str | None = None) -> list[Framework]:
    """Return the frameworks that this process has imported, without importing any.

    Frameworks that are imported but do not work on this machine are omitted, such as pyclesperanto without an
    OpenCL device.

    Args:
        name: Check only this framework. Defaults to all frameworks.

    Returns:
        The frameworks; a list of at most one if ``name`` is given.
    """
    names = dict.fromkeys((*BUILT_IN, *_instances)) if name is None else [name]
    ready = (
        load_or_none(one)
        for one in names
        if one in _instances or (one in BUILT_IN and is_imported(*BUILT_IN[one].packages))
    )
    return [one for one in ready if one is not None]


#: Maps the number of imported modules to the loaded frameworks.
_loaded: dict[int, list[Framework]] = new_cache()


def list_loaded_cached() -> list[Framework]:
    """Return the result of `loaded`, cached until another module is imported (0.1 µs instead of 10 µs)."""
    count = len(sys.modules)
    frameworks = _loaded.get(count)
    if frameworks is None:
        frameworks = loaded()  # may import modules
        remember(_loaded, len(sys.modules), frameworks)
    return frameworks


def load_or_none(name: str) -> Framework | None:
    """Return a framework; None if it cannot be loaded.

    A failed import is not repeated, because it may take seconds.
    """
    if name in _instances:
        return _instances[name]
    if name in _failed:
        return None
    try:
        return framework(name)
    except FrameworkNotInstalledError as error:
        _failed.add(name)
        if name in _plugins() and error.__cause__ is not None:  # a broken plug-in that the user did not name
            warn(f"The framework {error}", RuntimeWarning)
        return None


# -- lookup by array -----------------------------------------------------------------------------------


def find_owner(x: Any) -> Framework | None:
    """Return the framework of an array, without importing any framework.

    Args:
        x: Any object.

    Returns:
        The framework; None if ``x`` is not an array of a framework.
    """
    cls = type(x)
    try:
        return _owners[cls]
    except (KeyError, TypeError):  # the second one if the class is unhashable
        pass
    return _find_new_owner(x, cls)


@run_eagerly
def _find_new_owner(x: Any, cls: type) -> Framework | None:
    """Return the framework of an object whose class is not in the cache; None if there is none."""
    has_candidates = False
    for one in _candidates(cls):
        if _owns(one, x):
            return remember(_owners, cls, one)
        has_candidates = True
    # A plug-in that is not loaded yet could own the object.
    if not has_candidates and (cls.__module__ == "builtins" or _plugins().keys() <= _instances.keys()):
        remember(_owners, cls, None)
    return None


def _owns(one: Framework, x: Any) -> bool:
    """Return whether ``x`` is an array of the framework; False if reading its attributes raises an error."""
    try:
        return one.owns(x)
    except (RecursionError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001  # attributes of the object, or a plug-in, may raise anything
        if one.name not in BUILT_IN:
            cls = type(x)
            warn(
                f"{type(one).__qualname__}.owns() failed for an object of type {cls.__module__}."
                f"{cls.__qualname__}: {error_text(error)}.",
                RuntimeWarning,
            )
        return False


def _candidates(cls: type) -> Iterator[Framework]:
    """Yield the frameworks whose arrays may be instances of a class."""
    for root in packages_of(cls):
        if root not in names_by_module() and root != "builtins":
            # A plug-in may own arrays of this top-level package if its name is that of the package, or if
            # the package of its framework is imported.
            for name in _plugins():
                if name not in _instances and (name == root or is_imported(*metadata_of(name).packages)):
                    load_or_none(name)
        yield from map(framework, names_by_module().get(root, ()))


# -- lookup by device ----------------------------------------------------------------------------------


def _native_device(device: Device, name: FrameworkLike) -> Any:
    owner = framework(name)
    return owner.devices.native_device(find_device_or_host(owner, device))


def _read_device(x: Any) -> Device | None:
    """Return the device that a native device object denotes; None for other objects."""
    names = names_by_module().get(package_of(type(x)), ())
    candidates = (framework(name).devices.read_device(x) for name in names)
    return next((device for device in candidates if device is not None), None)


hooks.native_device = _native_device
hooks.read_device = _read_device
