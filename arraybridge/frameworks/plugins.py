"""Frameworks that other packages offer by an entry point: which there are, and what a broken one raises."""

from __future__ import annotations

from typing import TYPE_CHECKING

from arraybridge.errors import FrameworkNotInstalledError, text_of, told, warn
from arraybridge.frameworks.base import Framework
from arraybridge.frameworks.facts import BUILT_IN

if TYPE_CHECKING:
    from importlib.metadata import Distribution, EntryPoint

__all__ = ["GROUP", "broken", "distribution_of", "load", "package_of", "plugins"]

#: Entry-point group in which another package may offer frameworks: ``name = "package.module:Class"``.
GROUP = "arraybridge.frameworks"

_plugins: dict[str, EntryPoint] | None = None


def plugins() -> dict[str, EntryPoint]:
    """Entry points of other packages by framework name; none of them is loaded by asking."""
    global _plugins
    if _plugins is None:
        from importlib.metadata import entry_points  # costs 20 ms, and only an unknown name or type needs it

        unreadable: list[str] = []
        try:
            points = list(entry_points(group=GROUP))
        except _MALFORMED:
            points = _readable(unreadable)
        _plugins = {point.name: point for point in points if point.name not in BUILT_IN}
        if unreadable:
            warn(
                f"the entry points of {' and '.join(unreadable)} are malformed: what framework they may offer"
                " is not known; install them anew",
                RuntimeWarning,
            )
    return _plugins


# What reading malformed metadata raises. For all packages at once, the first such one fails all.
_MALFORMED = (TypeError, ValueError, AttributeError, KeyError)


def _readable(unreadable: list[str]) -> list[EntryPoint]:
    """The entry points of each package by itself; ``unreadable`` is filled with the names of the others."""
    from importlib.metadata import distributions

    found: list[EntryPoint] = []
    for one in distributions():
        try:
            found += one.entry_points.select(group=GROUP)
        except _MALFORMED:
            unreadable.append(_name_of(one) or "a package without a name")
    return found[::-1]  # of two of one name, the one that would be imported


def _name_of(one: Distribution) -> str:
    try:
        return one.name or ""
    except _MALFORMED:  # without the file METADATA
        return ""


def package_of(point: EntryPoint) -> str:
    """The top-level package that an entry point leads to; ``point.module`` raises where it is malformed."""
    return point.value.partition(":")[0].partition(".")[0].strip()


def distribution_of(point: EntryPoint) -> str:
    """What was installed to bring an entry point, or ``""`` where its metadata do not say."""
    return "" if point.dist is None else _name_of(point.dist)


def load(point: EntryPoint) -> Framework:
    """The framework that an entry point offers; raises whatever its code raises."""
    found = point.load()
    made = found() if isinstance(found, type) else found
    if not isinstance(made, Framework):
        raise TypeError(f"{found!r} is no subclass of Framework")
    if made.name != point.name:
        raise TypeError(f"the name of its class is {made.name!r}")
    return made


def broken(point: EntryPoint, error: BaseException) -> FrameworkNotInstalledError:
    """What to raise from an error that `load` has raised: it says whose the plug-in is, and what to do."""
    brought = distribution_of(point)
    whose = f"the package {brought}" if brought else "an installed package"
    do = f"pip install --upgrade {brought}, or uninstall it: pip uninstall {brought}"
    return FrameworkNotInstalledError(
        f"{point.name} is offered by {whose}, whose entry point {point.name} = {point.value} in the group"
        f" {GROUP} fails to load: {told(error)}. "
        + (f"Update that package, {do}." if brought else "Update that package, or uninstall it."),
        target_type=point.name,
        reason=text_of(error) or type(error).__name__,
    )
