"""Which framework has which name, and whose array this is; imports none before it is needed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

from arraybridge.errors import FrameworkNotInstalledError, UnknownFrameworkError, nearest, told, warn
from arraybridge.frameworks.base import Framework, find_or_host
from arraybridge.types import Device, FrameworkLike, above, empty_caches, new_cache, remember

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = [
    "BUILT_IN",
    "Facts",
    "can_find",
    "facts",
    "find_owner",
    "for_numpy_code",
    "framework",
    "framework_name",
    "framework_names",
    "install_command",
    "instances",
    "is_imported",
    "is_installed",
    "loaded",
    "register",
    "roots",
    "unregister",
    "usable",
    "version_of",
]

#: Entry-point group in which another package may offer frameworks: ``name = "package.module:Class"``.
GROUP = "arraybridge.frameworks"

_instances: dict[str, Framework] = {}
# Frameworks that did not load. Who names one has it tried again; who looks at all passes it over.
_failed: set[str] = set()
# Whose array an object is, is a question of its type alone.
_owners: dict[type, Framework] = new_cache()


# -- what is known without an import -------------------------------------------------------------------


@dataclass(slots=True, eq=False, repr=False)
class Facts:
    """What may be asked of a framework that nobody has imported. A plug-in sets `Framework.facts`, if at all.

    Attributes:
        name: how users name it; also the extra of arraybridge that installs it.
        packages: what ``import`` takes, the preferred one first; ``(name,)`` where empty.
        modules: root modules in which the types of its arrays are defined; ``packages`` where empty.
        distributions: what brings it, as package indexes call it, first the one to install; ``packages``
            where empty.
        runs_numpy_code: whether functions written for NumPy run on its arrays: True where ``@gpu``,
            `array_namespace` and `compare` may choose it, None where ``@gpu`` takes it by name alone, False
            where it never does. The first in the list is the nearest to NumPy.
        libraries: parts of paths by which one sees that a process has loaded it; None for the folders of its
            ``modules``.
        nicknames: what people call it in code; not accepted, but understood by suggestions.
    """

    name: str
    packages: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    distributions: tuple[str, ...] = ()
    runs_numpy_code: bool | None = None
    libraries: tuple[str, ...] | None = None
    nicknames: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.packages = self.packages or (self.name,)
        self.modules = self.modules or self.packages
        self.distributions = self.distributions or self.packages
        if self.libraries is None:
            self.libraries = tuple(f"/{module}/" for module in self.modules)


_CUPYS = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
_CLESPERANTOS = ("pyclesperanto", "pyclesperanto_prototype")

BUILT_IN = {
    one.name: one
    for one in (
        Facts("numpy", runs_numpy_code=False, libraries=(), nicknames=("np",)),
        Facts("cupy", distributions=_CUPYS, runs_numpy_code=True, nicknames=("cp",)),
        Facts("torch", runs_numpy_code=True, nicknames=("pytorch",)),
        Facts("jax", modules=("jax", "jaxlib"), runs_numpy_code=True, nicknames=("jnp",)),
        Facts(
            "tensorflow",
            distributions=("tensorflow", "tensorflow-cpu"),
            runs_numpy_code=False,
            nicknames=("tf", "keras"),
        ),
        Facts(
            "pyclesperanto",
            packages=_CLESPERANTOS,
            modules=(*_CLESPERANTOS, "pyclesperanto_opencl", "pyclesperanto_cuda", "pyclesperanto_metal"),
            runs_numpy_code=False,
            libraries=("/pyclesperanto", "/pyopencl/"),
            nicknames=("cle", "opencl"),
        ),
        Facts("mlx"),
        Facts("paddle", distributions=("paddlepaddle", "paddlepaddle-gpu")),
    )
}


def version_of(name: str) -> str:
    """The version of a framework that is installed, without its import; ``""`` where it is not."""
    from importlib.metadata import distributions  # costs 20 ms

    names = facts(name).distributions
    return next((one.version for word in names for one in distributions(name=word)), "")


def install_command(facts: Facts, *options: str) -> str:
    """The command that installs a framework."""
    return " ".join(("pip install", *options, f'"{facts.distributions[0]}"'))


def how_to_install(facts: Facts, *options: str) -> str:
    """What to run. The package index has another arraybridge: the extras are to be had from a checkout."""
    command, extra = install_command(facts, *options), facts.name
    if extra == "cupy":
        command += " (for CUDA 12: cupy-cuda12x)"
        extra = facts.distributions[0]
    return f'{command}, or {" ".join(("pip install", *options))} ".[{extra}]" in a checkout of arraybridge'


def is_imported(*packages: str) -> bool:
    """Whether this process has imported one of them; what stands in for one in a test is no module."""
    return any(isinstance(sys.modules.get(package), ModuleType) for package in packages)


def can_find(package: str) -> bool:
    """Whether a top-level package is imported, or would be found."""
    if package in sys.modules:
        return is_imported(package)
    from importlib.util import find_spec  # 1 ms

    try:
        return find_spec(package) is not None
    except ImportError:  # an import hook refuses it
        return False


@cache
def _plugins() -> dict[str, EntryPoint]:
    """Entry points of other packages by framework name; none of them is loaded by asking."""
    from importlib.metadata import entry_points  # costs 20 ms, and only an unknown name or type needs it

    return {point.name: point for point in entry_points(group=GROUP) if point.name not in BUILT_IN}


def facts(name: str) -> Facts:
    """What is known of a framework without importing it.

    >>> facts("jax").modules
    ('jax', 'jaxlib')
    """
    if name in _instances:
        return _facts_of(_instances[name])
    if name in BUILT_IN or name not in _plugins():
        return BUILT_IN.get(name) or Facts(name)
    point = _plugins()[name]
    distributions = () if point.dist is None else (point.dist.name,)
    return Facts(name, packages=(point.module.partition(".")[0],), distributions=distributions)


def _facts_of(framework: Framework) -> Facts:
    return framework.facts or BUILT_IN.get(framework.name) or Facts(framework.name, modules=framework.modules)


def framework_names() -> list[str]:
    """Names of every framework known: built in, registered, or offered by an installed package."""
    return list(dict.fromkeys((*BUILT_IN, *_instances, *_plugins())))


def for_numpy_code() -> list[str]:
    """Names of the frameworks on whose arrays functions written for NumPy run, the nearest to NumPy first."""
    return [name for name in framework_names() if facts(name).runs_numpy_code]


@cache
def roots() -> dict[str, tuple[str, ...]]:
    """Root module of an array's class → the frameworks to ask, so that a look at an object imports none."""
    names: dict[str, tuple[str, ...]] = {}
    for one in (*BUILT_IN.values(), *map(_facts_of, _instances.values())):
        for root in (module.partition(".")[0] for module in one.modules):
            names[root] = tuple(dict.fromkeys((*names.get(root, ()), one.name)))
    return names


# -- adding frameworks ---------------------------------------------------------------------------------


def register(framework: Framework, *, replace: bool = False) -> Framework:
    """Add a framework and return it.

    Args:
        framework: An instance of a subclass of `Framework`.
        replace: Whether to replace a framework of the same name. Defaults to False.

    Raises:
        TypeError: If it is not such an instance, or has no name.
        ValueError: If the name exists and ``replace`` is false, or if the class lacks required methods
            or ``modules``.
    """
    if not isinstance(framework, Framework):
        raise TypeError(f"register() takes an instance of a Framework subclass, not {framework!r}")
    name: object = getattr(framework, "name", None)
    if not isinstance(name, str) or not name:
        raise TypeError(f"{type(framework).__name__} needs a class attribute 'name', a string")
    missing = _missing_parts(framework)
    if missing:
        raise ValueError(
            f"Cannot register {type(framework).__name__}: it lacks {' and '.join(missing)}."
            " Define these in the class; see arraybridge.Framework."
        )
    if not replace and name in framework_names():
        raise ValueError(
            f"Cannot register {type(framework).__name__}: a framework named {name!r} exists."
            " Choose another name, or pass replace=True."
        )
    return _install(framework)


def _install(framework: Framework) -> Framework:
    _instances[framework.name] = framework
    _forget()
    return framework


def _missing_parts(framework: Framework) -> list[str]:
    """Return the required attributes that a framework lacks, in words.

    A module with ``from_dlpack`` is enough for the methods: their defaults use DLPack.
    """
    cls, modules = type(framework), _facts_of(framework).modules if framework.facts else framework.modules
    missing = []
    if isinstance(modules, str) or not modules or not all(isinstance(one, str) for one in modules):
        return ["modules (a tuple of package names)"]
    has_dlpack = hasattr(sys.modules.get(modules[0]), "from_dlpack")
    if cls.from_host is Framework.from_host and not has_dlpack:
        missing.append(f"from_host (the module {modules[0]} has no from_dlpack)")
    reads = (cls.host_view, cls.to_host) != (Framework.host_view, Framework.to_host)
    if not reads and not has_dlpack:
        missing.append("host_view or to_host")
    return missing


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


# -- by name -------------------------------------------------------------------------------------------


def framework_name(name: FrameworkLike) -> str:
    """The plain name, checked without importing anything.

    Raises:
        UnknownFrameworkError: it is unknown; the message lists the known ones and the nearest.
        TypeError: it is no string.
    """
    if not isinstance(name, str):
        raise TypeError(f"a framework is named by a string or a MemoryType, not by {name!r}")
    plain = str(name)
    if plain in BUILT_IN or plain in _instances or plain in _plugins():
        return plain
    names = framework_names()
    nicknamed = [one.name for one in BUILT_IN.values() if plain.lower() in one.nicknames]
    suggestion = f" (did you mean {nicknamed[0]!r}?)" if nicknamed else nearest(plain, names)
    raise UnknownFrameworkError(
        f"{plain!r} is no framework that arraybridge knows{suggestion}; known are {', '.join(names)}."
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
    """Import a framework that arraybridge brings, or that another package offers."""
    try:
        if name in BUILT_IN:
            is_folder = name in ("torch", "jax", "tensorflow", "pyclesperanto")
            room = f"{name}.arrays" if is_folder else name
            module = importlib.import_module(f"arraybridge.frameworks.{room}")
            offered = getattr(module, f"{name.capitalize()}Framework")
        else:
            offered = _plugins()[name].load()
        instance = offered if isinstance(offered, Framework) else offered()
        if not isinstance(instance, Framework):
            raise TypeError(f"{offered!r} is no subclass of Framework")
        if instance.name != name:
            raise TypeError(f"the name of its class is {instance.name!r}")
    except FrameworkNotInstalledError:
        raise
    except (Exception, SystemExit) as error:  # the code of others may raise anything
        raise FrameworkNotInstalledError(
            _why_not_loaded(facts(name), error), target_type=name, reason=told(error)
        ) from error
    if name not in BUILT_IN and name not in _instances:
        return register(instance, replace=True)  # its entry point has the name already
    return _instances.setdefault(name, instance)


def _why_not_loaded(own: Facts, error: BaseException) -> str:
    """What an import raised, and what to do."""
    name, root = own.name, (getattr(error, "name", None) or "").partition(".")[0]
    if name not in BUILT_IN:
        package = own.distributions[0]
        return (
            f"{name} is offered by the package {package}, whose entry point {name} = {_plugins()[name].value}"
            f" in the group {GROUP} fails to load: {told(error)}. Update that package,"
            f" pip install --upgrade {package}, or uninstall it: pip uninstall {package}."
        )
    if not is_installed(name) or (isinstance(error, ModuleNotFoundError) and root in own.packages):
        return f"{name} is not installed; run {how_to_install(own)}."
    return (
        f"{name} is installed, but importing it failed: {told(error)}."
        f" Reinstall it: {how_to_install(own, '--force-reinstall')}."
    )


def is_installed(name: str) -> bool:
    """Whether the framework's package can be found, without importing it."""
    if name not in BUILT_IN:
        return name in _instances or name in _plugins()
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


#: The loaded frameworks, by the number of modules that the process has imported.
_loaded: dict[int, list[Framework]] = new_cache()


def loaded_now() -> list[Framework]:
    """Return the same as `loaded`, kept until the process imports another module: 0.1 µs instead of 10."""
    count = len(sys.modules)
    frameworks = _loaded.get(count)
    if frameworks is None:
        frameworks = loaded()  # may import modules
        remember(_loaded, len(sys.modules), frameworks)
    return frameworks


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
        if name in _plugins() and error.__cause__ is not None:  # a broken plug-in, which nobody has named
            warn(f"the framework {error}", RuntimeWarning)
        return None


# -- by an array ---------------------------------------------------------------------------------------


def find_owner(x: Any) -> Framework | None:
    """The framework whose array ``x`` is, or None; imports no framework."""
    cls = type(x)
    owner = _owners.get(cls)
    if owner is None:
        owner = next((one for one in _candidates(cls) if _owns(one, x)), None)
        if owner is not None:
            remember(_owners, cls, owner)
    return owner


def _owns(one: Framework, x: Any) -> bool:
    """Return whether ``x`` is an array of the framework; False for an object that cannot answer."""
    try:
        return one.owns(x)
    except (RecursionError, MemoryError):
        raise
    except Exception:  # noqa: BLE001  # of the object's own attributes, such as its __class__, or a plug-in
        return False


def _candidates(cls: type) -> Iterator[Framework]:
    """The frameworks whose array an object of that class may be."""
    for root in dict.fromkeys(str(base.__module__).partition(".")[0] for base in cls.__mro__):
        if root not in roots() and root != "builtins":
            for name in _plugins():  # may it own arrays of this root? It has their name, or is imported
                if name not in _instances and (name == root or is_imported(*facts(name).packages)):
                    usable(name)
        yield from map(framework, roots().get(root, ()))


# -- by other objects of a framework -------------------------------------------------------------------


def _native_device(device: Device, name: FrameworkLike) -> Any:
    owner = framework(name)
    return owner.native_device(find_or_host(owner, device))


def _read_device(x: Any) -> Device | None:
    """The device that the object of a framework stands for; None for what is none. Imports no framework."""
    names = roots().get(type(x).__module__.partition(".")[0], ())
    readings = (framework(name).read_device(x) for name in names)
    return next((device for device in readings if device is not None), None)


above["native device"] = _native_device
above["read device"] = _read_device
