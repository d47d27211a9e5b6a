"""Which framework has which name, and whose array this is; imports none before it is needed."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from arraybridge.errors import (
    FrameworkNotInstalledError,
    UnknownArrayError,
    UnknownFrameworkError,
    nearest,
    text_of,
    told,
    warn,
)
from arraybridge.frameworks.base import Framework, find_or_host
from arraybridge.frameworks.facts import BUILT_IN, Facts
from arraybridge.frameworks.hints import hint_for
from arraybridge.frameworks.plugins import broken, distribution_of, load, package_of, plugins
from arraybridge.frameworks.presence import can_find, is_being_imported, is_hidden, is_imported
from arraybridge.types import Device, FrameworkLike, TypeMemo, native_makers, native_readers

__all__ = [
    "facts",
    "find_owner",
    "framework",
    "framework_names",
    "is_installed",
    "loaded",
    "register",
    "unregister",
    "usable",
]

# Root module of an array's class → the frameworks to ask, so that a look at an object imports nothing.
_ROOTS: dict[str, tuple[str, ...]] = {}
for _facts in BUILT_IN.values():
    for _root in _facts.modules:
        _ROOTS[_root] = (*_ROOTS.get(_root, ()), _facts.name)

#: Called whenever a framework is added, so that caches of the layers above can be dropped.
on_register: list[Callable[[], None]] = []

_instances: dict[str, Framework] = {}
# Whose array an object is, is a question of its type alone. Classes made in a loop must not pile up.
_owners: TypeMemo[Framework] = TypeMemo()
#: How often a framework was added or removed.
_changes = 0
# Imported, but of no use here → the modules that were tried; others in their place are asked anew. They are
# kept alive, so that none can come to be at the address of one that was tried.
_unusable: dict[str, list[ModuleType | None]] = {}
# Plug-ins that do not load → whether there is nothing more to warn of.
_broken: dict[str, bool] = {}
# Held while a framework is added, never while one is imported: what is imported may come back here, in a
# thread that holds Python's lock of a module for which this one waits.
_lock = threading.RLock()


def register(framework: Framework) -> Framework:
    """Add a framework, or replace the one of the same name; returns it.

    Args:
        framework: an instance of a subclass of `Framework`.

    Raises:
        TypeError: it is no such instance, has no name, or its ``modules`` are no tuple of names.
    """
    return _add(framework, replaces=True)


def _add(framework: Framework, *, replaces: bool) -> Framework:
    """The framework of that name which is there in the end: of two that do not replace, the first."""
    if not isinstance(framework, Framework):
        raise TypeError(f"register() takes an instance of a Framework subclass, not {framework!r}")
    if not isinstance(getattr(framework, "name", None), str) or not framework.name:
        raise TypeError(f"{type(framework).__name__} needs a class attribute 'name', a string")
    modules: object = facts_of(framework).modules
    if not isinstance(modules, (tuple, list)) or not all(isinstance(module, str) for module in modules):
        raise TypeError(
            f"the modules of {type(framework).__name__} are {modules!r}; they must be a tuple of names, as in"
            f" modules = ({framework.name!r},)"
        )
    with _lock:
        if not replaces and framework.name in _instances:
            return _instances[framework.name]
        _instances[framework.name] = framework
        _broken.pop(framework.name, None)
        for module in modules:
            root = module.partition(".")[0]
            known = _ROOTS.get(root, ())
            if framework.name not in known:
                _ROOTS[root] = (*known, framework.name)
        _forget()
    return framework


def unregister(name: str) -> None:
    """Forget a framework that was registered; one that arraybridge or a package brings is found again.

    Raises:
        UnknownFrameworkError: no framework of that name was registered.
    """
    with _lock:
        if name not in _instances:
            raise UnknownFrameworkError(f"no framework {name!r} is registered")
        del _instances[name]
        own = BUILT_IN[name].modules if name in BUILT_IN else ()
        for root in [root for root, names in _ROOTS.items() if name in names and root not in own]:
            _ROOTS[root] = tuple(one for one in _ROOTS[root] if one != name)
            if not _ROOTS[root]:
                del _ROOTS[root]
        _forget()


def instances() -> dict[str, Framework]:
    """The frameworks that are ready: imported, or registered."""
    return dict(_instances)


def _forget() -> None:
    global _changes
    _changes += 1
    _owners.clear()
    for forget in on_register:
        forget()


def facts(name: str) -> Facts:
    """What is known of a framework without importing it.

    >>> facts("jax").modules
    ('jax', 'jaxlib')
    """
    ready = _instances.get(name)
    if ready is not None:
        return facts_of(ready)
    if name in BUILT_IN:
        return BUILT_IN[name]
    point = plugins().get(name)
    if point is None:
        return Facts(name)
    brought = distribution_of(point)
    return Facts(name, packages=(package_of(point),), distributions=(brought,) if brought else ())


def facts_of(ready: Framework) -> Facts:
    """What is known of a framework that is imported."""
    return ready.facts or BUILT_IN.get(ready.name) or Facts(ready.name, modules=ready.modules)


def for_numpy_code() -> list[str]:
    """Names of the frameworks on whose arrays functions written for NumPy run, the nearest to NumPy first."""
    return [name for name in framework_names() if facts(name).runs_numpy_code]


def framework_names() -> list[str]:
    """Names of every framework known: built in, registered, or offered by an installed package."""
    return list(dict.fromkeys((*BUILT_IN, *_instances, *plugins())))


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
    known = framework_names()
    meant = [name for name, one in BUILT_IN.items() if plain.lower() in one.nicknames]
    suggestion = f" (did you mean {meant[0]!r}?)" if meant else nearest(plain, known)
    raise UnknownFrameworkError(
        f"{plain!r} is no framework that arraybridge knows{suggestion}; known are {', '.join(known)}"
    )


def framework(name: FrameworkLike) -> Framework:
    """The framework of that name, imported if it was not yet.

    Raises:
        UnknownFrameworkError: the name is unknown; the message lists the known ones and the nearest.
        FrameworkNotInstalledError: it is not installed, or its import fails.

    >>> framework("numpy").name
    'numpy'
    """
    found = _instances.get(name) if isinstance(name, str) else None
    return found if found is not None else _load(framework_name(name))


def _load(name: str) -> Framework:
    if name not in BUILT_IN:
        return _load_plugin(name)
    try:
        room = importlib.import_module(_ROOMS + (".numpy" if name == "numpy" else f".{name}.arrays"))
        made: Framework = getattr(room, f"{name.capitalize()}Framework")()
    except FrameworkNotInstalledError:
        _drop_rooms(name)
        raise
    # The code of others may raise anything; some packages leave the program where they miss something.
    except (Exception, SystemExit) as error:
        _drop_rooms(name)
        raise _import_failed(name, error) from error
    with _lock:
        return _instances.setdefault(name, made)


_ROOMS = "arraybridge.frameworks"


def _drop_rooms(name: str) -> None:
    """Forget our modules for a framework that did not load: they hold the package as it was found then."""
    with _lock:
        if name in _instances:  # another thread has loaded it
            return
        for module in [*sys.modules]:
            folder, _, file = module.rpartition(".")
            if folder == f"{_ROOMS}.{name}" and not is_being_imported(module):
                sys.modules.pop(module, None)
                vars(sys.modules[folder]).pop(file, None)  # where `from … import …` would find it


def _load_plugin(name: str) -> Framework:
    point = plugins()[name]
    try:
        return _add(load(point), replaces=False)
    except FrameworkNotInstalledError:
        _broken.setdefault(name, True)  # it says itself what it misses, and works elsewhere
        raise
    except (Exception, SystemExit) as error:  # the code of others may raise anything
        _broken.setdefault(name, False)
        raise broken(point, error) from error


def usable(name: str) -> Framework | None:
    """That framework, or None where it is not installed or does not work here.

    A plug-in that does not load is named in one warning: whoever calls this has not asked for it.
    """
    if not is_installed(name):
        return None
    try:
        return framework(name)
    except FrameworkNotInstalledError as error:
        if _broken.get(name) is False:
            _broken[name] = True
            warn(f"the framework {error}", RuntimeWarning)
        return None


def _import_failed(name: str, error: BaseException) -> FrameworkNotInstalledError:
    if is_hidden(facts(name).packages, error):
        message = how_to_install(name)
    else:
        message = (
            f"{name} is installed, but importing it failed: {told(error)}."
            f" Reinstall it: {_commands(name, '--force-reinstall')}."
        )
    return FrameworkNotInstalledError(message, target_type=name, reason=text_of(error) or "")


def install_command(name: str, *options: str) -> str:
    """The command that installs a framework in a release that arraybridge works with."""
    return " ".join(("pip install", *options, *(f'"{one}"' for one in facts(name).requirements)))


def how_to_install(name: str) -> str:
    """What to do where a framework is missing, in a sentence."""
    return f"{name} is not installed; run {_commands(name)}."


def _commands(name: str, *options: str) -> str:
    """What to run. The package index has another arraybridge: the extras are to be had from a checkout."""
    extra = facts(name).extra
    command = install_command(name, *options)
    if name == "cupy":
        command += " (for CUDA 12: cupy-cuda12x)"
    if extra:
        command += f', or {" ".join(("pip install", *options))} ".[{extra}]" in a checkout of arraybridge'
    return command


def roots() -> dict[str, tuple[str, ...]]:
    """Root module of the arrays' classes → the frameworks of which they may be."""
    return _ROOTS.copy()  # in one step: other threads may register


def is_installed(name: str) -> bool:
    """Whether the framework's package can be found, without importing it."""
    if name not in BUILT_IN:
        return name in _instances or name in plugins()
    return any(can_find(package) for package in facts(name).packages)


def loaded(name: str | None = None) -> list[Framework]:
    """The frameworks that this process has imported, or that one of them; imports none.

    One that is imported but does not work here (pyclesperanto without an OpenCL device) is left out, and one
    whose import is not at its end.
    """
    found, modules = [], sys.modules.keys()
    for known in framework_names() if name is None else [name]:
        ready = _instances.get(known)
        if ready is None and known in BUILT_IN:
            packages = BUILT_IN[known].packages
            if not modules.isdisjoint(packages):
                there = [*map(sys.modules.get, packages)]
                if there != _unusable.get(known):
                    ready = _ready_now(known, packages, there)
        if ready is not None:
            found.append(ready)
    return found


def _ready_now(name: str, packages: tuple[str, ...], there: list[ModuleType | None]) -> Framework | None:
    if not any(map(is_imported, packages)) or any(map(is_being_imported, packages)):
        return None
    try:
        return framework(name)
    except FrameworkNotInstalledError:
        _unusable[name] = there
        return None


def _native_device(device: Device, name: FrameworkLike) -> Any:
    one = framework(framework_name(name))
    found = find_or_host(one, device)
    native = one.pool.native_device(found)
    return str(found) if native is None else native


native_makers.append(_native_device)


def find_owner(x: Any) -> Framework | None:
    """The framework whose array ``x`` is, or None; imports no framework."""
    cls = type(x)
    owner = _owners.get(cls)
    if owner is None:
        before = _changes
        owner = _find_owner(x, cls)
        if owner is not None:
            _owners.keep(cls, owner)
            if _changes != before:  # another thread has registered or removed one meanwhile
                _owners.clear()
    return owner


def _find_owner(x: Any, cls: type) -> Framework | None:
    roots = dict.fromkeys(base.__module__.partition(".")[0] for base in cls.__mro__)
    for root in roots:
        if root not in _ROOTS:
            _load_plugins(root, x)
        for name in _ROOTS.get(root, ()):
            candidate = framework(name)
            if candidate.owns(x):
                return candidate
    return None


def _load_plugins(root: str, x: Any) -> None:
    """Load the plugins that may own ``x``, a class of which has the root module ``root``.

    A plugin is loaded when it is named like that module, or when its own package is imported already.

    Raises:
        FrameworkNotInstalledError: ``x`` looks like an array of one that does not load.
    """
    if root == "builtins":
        return  # lists, numbers and what every class derives from are nobody's arrays
    for name, point in plugins().items():
        package = package_of(point)
        if name in _instances or (name != root and not is_imported(package)) or is_being_imported(package):
            continue
        if root in (name, package) and _looks_like_an_array(x):
            framework(name)
        elif name not in _broken:
            usable(name)


def _looks_like_an_array(x: Any) -> bool:
    return is_foreign_array(x) or (offers(x, "shape") and offers(x, "dtype"))


_NO_NUMBERS = (np.flexible, np.datetime64, np.timedelta64, np.object_)


def _read_device(x: Any) -> Device | None:
    """The device that the object of a framework stands for; None for what is none. Imports no framework."""
    for name in _ROOTS.get(type(x).__module__.partition(".")[0], ()):
        found = framework(name).pool.read_device(x)
        if found is not None:
            return found
    return None


native_readers.append(_read_device)


def is_oom_of_a_library(error: BaseException) -> bool:
    """Whether a library on which a framework stands, used alone, has run out of memory: pyopencl, say."""
    root = type(error).__module__.partition(".")[0]
    for one in BUILT_IN.values():
        if one.beneath is not None and one.beneath[0] == root:
            return bool(importlib.import_module(f"arraybridge.frameworks.{one.beneath[1]}").is_oom(error))
    return False


_PROTOCOLS = ("__dlpack__", "__array_interface__", "__cuda_array_interface__")


def is_foreign_array(x: Any) -> bool:
    """Whether ``x`` offers one of the array protocols; of NumPy's scalars, those that are numbers do."""
    if isinstance(x, (type, *_NO_NUMBERS)):
        return False
    return any(offers(x, protocol) for protocol in _PROTOCOLS) or fetched_by(type(x)) is not None


# Arrays on devices whose libraries offer no protocol, and the methods that bring them to the host.
_FETCHED = {
    ("pyopencl.array", "Array"): "get",
    ("numba.cuda.simulator.cudadrv.devicearray", "FakeCUDAArray"): "copy_to_host",
}


def fetched_by(cls: type) -> str | None:
    """The method by which an array of this class comes to the host, where there is no other way."""
    found = (_FETCHED.get((base.__module__, base.__qualname__)) for base in cls.__mro__)
    return next((name for name in found if name is not None), None)


def offers(x: Any, protocol: str) -> bool:
    """Whether the class of ``x`` has the attribute, or the object itself does; asks no ``__getattr__``."""
    return hasattr(type(x), protocol) or protocol in getattr(x, "__dict__", ())


def offers_alone(x: Any) -> bool:
    """Whether ``x`` offers an array protocol that others of its class may lack."""
    own = getattr(x, "__dict__", ())
    return any(protocol in own and not hasattr(type(x), protocol) for protocol in _PROTOCOLS)


def unknown_array(x: Any) -> UnknownArrayError:
    """The error for an object that is no array, with what would help.

    Raises:
        FrameworkNotInstalledError: it may be one of a plug-in that does not load.
    """
    roots = {base.__module__.partition(".")[0] for base in type(x).__mro__}
    for name in tuple(_broken):
        if not roots.isdisjoint((name, package_of(plugins()[name]))):
            framework(name)
    cls = f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")
    return UnknownArrayError(
        f"an object of type {cls} is no array: {hint_for(x)}", reason=f"{cls} is no array"
    )
