"""Which framework has which name, and whose array this is; imports none before it is needed."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import cache
from typing import Any

from arraybridge.errors import (
    FrameworkNotInstalledError,
    UnknownFrameworkError,
    nearest,
    told,
    warn,
)
from arraybridge.frameworks.base import Framework, find_or_host
from arraybridge.frameworks.facts import BUILT_IN, Facts, can_find, how_to_install, is_imported
from arraybridge.frameworks.plugins import facts_of_plugin, load, package_of, plugins
from arraybridge.types import Cache, Device, FrameworkLike, above, empty_caches

__all__ = [
    "facts",
    "find_owner",
    "for_numpy_code",
    "framework",
    "framework_name",
    "framework_names",
    "instances",
    "is_installed",
    "loaded",
    "register",
    "roots",
    "unregister",
    "usable",
]

_instances: dict[str, Framework] = {}
# Frameworks that did not load. Who names one has it tried again; who looks at all passes it over.
_failed: set[str] = set()
# Whose array an object is, is a question of its type alone.
_owners: Cache[type, Framework] = Cache()


# -- adding frameworks ---------------------------------------------------------------------------------


def register(framework: Framework) -> Framework:
    """Add a framework, or replace the one of the same name; returns it.

    Args:
        framework: an instance of a subclass of `Framework`.

    Raises:
        TypeError: it is no such instance, or has no name.
    """
    if not isinstance(framework, Framework):
        raise TypeError(f"register() takes an instance of a Framework subclass, not {framework!r}")
    name: object = getattr(framework, "name", None)
    if not isinstance(name, str) or not name:
        raise TypeError(f"{type(framework).__name__} needs a class attribute 'name', a string")
    _instances[name] = framework
    _forget()
    return framework


def unregister(name: str) -> None:
    """Forget a framework that was registered; one that arraybridge or a package brings is found again.

    Raises:
        UnknownFrameworkError: no framework of that name was registered.
    """
    if _instances.pop(name, None) is None:
        raise UnknownFrameworkError(f"no framework {name!r} is registered")
    _forget()


def _forget() -> None:
    """What was known of types, devices and calls, as far as it rests on which frameworks there are."""
    roots.cache_clear()
    empty_caches()


def instances() -> dict[str, Framework]:
    """The frameworks that are ready: imported, or registered."""
    return dict(_instances)


@cache
def roots() -> dict[str, tuple[str, ...]]:
    """Root module of an array's class → the frameworks to ask, so that a look at an object imports none."""
    names: dict[str, tuple[str, ...]] = {}
    for one in (*BUILT_IN.values(), *map(_facts_of, _instances.values())):
        for root in (module.partition(".")[0] for module in one.modules):
            names[root] = tuple(dict.fromkeys((*names.get(root, ()), one.name)))
    return names


# -- by name -------------------------------------------------------------------------------------------


def facts(name: str) -> Facts:
    """What is known of a framework without importing it.

    >>> facts("jax").modules
    ('jax', 'jaxlib')
    """
    if name in _instances:
        return _facts_of(_instances[name])
    if name in BUILT_IN:
        return BUILT_IN[name]
    return facts_of_plugin(plugins()[name]) if name in plugins() else Facts(name)


def _facts_of(framework: Framework) -> Facts:
    return framework.facts or BUILT_IN.get(framework.name) or Facts(framework.name, modules=framework.modules)


def framework_names() -> list[str]:
    """Names of every framework known: built in, registered, or offered by an installed package."""
    return list(dict.fromkeys((*BUILT_IN, *_instances, *plugins())))


def for_numpy_code() -> list[str]:
    """Names of the frameworks on whose arrays functions written for NumPy run, the nearest to NumPy first."""
    return [name for name in framework_names() if facts(name).runs_numpy_code]


def framework_name(name: FrameworkLike) -> str:
    """The plain name, checked without importing anything.

    Raises:
        UnknownFrameworkError: it is unknown; the message lists the known ones and the nearest.
        TypeError: it is no string.
    """
    if not isinstance(name, str):
        raise TypeError(f"a framework is named by a string or a MemoryType, not by {name!r}")
    plain = str(name)
    if plain in BUILT_IN or plain in _instances or plain in plugins():
        return plain
    names = framework_names()
    nicknamed = [one.name for one in BUILT_IN.values() if plain.lower() in one.nicknames]
    suggestion = f" (did you mean {nicknamed[0]!r}?)" if nicknamed else nearest(plain, names)
    raise UnknownFrameworkError(
        f"{plain!r} is no framework that arraybridge knows{suggestion}; known are {', '.join(names)}"
    )


def framework(name: FrameworkLike) -> Framework:
    """The framework of that name, imported if it was not yet.

    Raises:
        UnknownFrameworkError: the name is unknown; the message lists the known ones and the nearest.
        FrameworkNotInstalledError: it is not installed, or its import fails.

    >>> framework("numpy").name
    'numpy'
    """
    ready = _instances.get(name) if isinstance(name, str) else None
    return ready if ready is not None else _load(framework_name(name))


def _load(name: str) -> Framework:
    if name not in BUILT_IN:
        offered = load(plugins()[name])
        return _instances.get(name) or register(offered)
    try:
        room = "numpy" if name == "numpy" else f"{name}.arrays"
        module = importlib.import_module(f"arraybridge.frameworks.{room}")
        instance: Framework = getattr(module, f"{name.capitalize()}Framework")()
    except FrameworkNotInstalledError:
        raise
    except (Exception, SystemExit) as error:  # the code of others may raise anything
        raise _import_failed(BUILT_IN[name], error) from error
    return _instances.setdefault(name, instance)


def _import_failed(own: Facts, error: BaseException) -> FrameworkNotInstalledError:
    name = own.name
    root = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if root in own.packages or not is_installed(name):
        message = f"{name} is not installed; run {how_to_install(own)}."
    else:
        message = (
            f"{name} is installed, but importing it failed: {told(error)}."
            f" Reinstall it: {how_to_install(own, '--force-reinstall')}."
        )
    return FrameworkNotInstalledError(message, target_type=name, reason=told(error))


def is_installed(name: str) -> bool:
    """Whether the framework's package can be found, without importing it."""
    if name not in BUILT_IN:
        return name in _instances or name in plugins()
    return any(can_find(package) for package in BUILT_IN[name].packages)


def loaded(name: str | None = None) -> list[Framework]:
    """The frameworks that this process has imported, or that one of them; imports none.

    One that is imported but does not work here (pyclesperanto without an OpenCL device) is left out.
    """
    names = dict.fromkeys((*BUILT_IN, *_instances)) if name is None else [name]
    ready = (
        usable(one)
        for one in names
        if one in _instances or (one in BUILT_IN and is_imported(*BUILT_IN[one].packages))
    )
    return [one for one in ready if one is not None]


def usable(name: str) -> Framework | None:
    """That framework, None where it does not load; tried once, since a failing import may take seconds."""
    if name in _instances:
        return _instances[name]
    if name in _failed:
        return None
    try:
        return framework(name)
    except FrameworkNotInstalledError as error:
        _failed.add(name)
        if name in plugins() and error.__cause__ is not None:  # a broken plug-in, which nobody has named
            warn(f"the framework {error}", RuntimeWarning)
        return None


# -- by an array ---------------------------------------------------------------------------------------


def find_owner(x: Any) -> Framework | None:
    """The framework whose array ``x`` is, or None; imports no framework."""
    cls = type(x)
    owner = _owners.get(cls)
    if owner is None:
        owner = next((one for one in _candidates(cls) if one.owns(x)), None)
        if owner is not None:
            _owners.keep(cls, owner)
    return owner


def _candidates(cls: type) -> Iterator[Framework]:
    """The frameworks whose array an object of that class may be."""
    for root in dict.fromkeys(base.__module__.partition(".")[0] for base in cls.__mro__):
        if root not in roots() and root != "builtins":
            _load_plugins(root)
        yield from map(framework, roots().get(root, ()))


def _load_plugins(root: str) -> None:
    """Load the plug-ins that may own arrays of that root module: it has their name, or they are imported."""
    for name, point in plugins().items():
        if name not in _instances and (name == root or is_imported(package_of(point))):
            usable(name)


# -- by other objects of a framework -------------------------------------------------------------------


def _native_device(device: Device, name: FrameworkLike) -> Any:
    owner = framework(name)
    own_device = find_or_host(owner, device)
    native = owner.pool.native_device(own_device)
    return str(own_device) if native is None else native


def _read_device(x: Any) -> Device | None:
    """The device that the object of a framework stands for; None for what is none. Imports no framework."""
    names = roots().get(type(x).__module__.partition(".")[0], ())
    readings = (framework(name).pool.read_device(x) for name in names)
    return next((device for device in readings if device is not None), None)


above["native device"] = _native_device
above["read device"] = _read_device
