"""Frameworks that other packages offer by an entry point."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from arraybridge.errors import FrameworkNotInstalledError, told
from arraybridge.frameworks.base import Framework
from arraybridge.frameworks.facts import BUILT_IN, Facts

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

#: Entry-point group in which another package may offer frameworks: ``name = "package.module:Class"``.
GROUP = "arraybridge.frameworks"


@functools.cache
def plugins() -> dict[str, EntryPoint]:
    """Entry points of other packages by framework name; none of them is loaded by asking."""
    from importlib.metadata import entry_points  # costs 20 ms, and only an unknown name or type needs it

    return {point.name: point for point in entry_points(group=GROUP) if point.name not in BUILT_IN}


def package_of(point: EntryPoint) -> str:
    """The top-level package that an entry point leads to."""
    return point.value.partition(":")[0].partition(".")[0].strip()


def facts_of_plugin(point: EntryPoint) -> Facts:
    """What is known of a framework before its plug-in is loaded."""
    distributions = () if point.dist is None else (point.dist.name,)
    return Facts(point.name, packages=(package_of(point),), distributions=distributions)


def load(point: EntryPoint) -> Framework:
    """The framework that an entry point offers.

    Raises:
        FrameworkNotInstalledError: it does not load; the message says whose it is, and what to do.
    """
    try:
        offered = point.load()
        framework = offered() if isinstance(offered, type) else offered
        if not isinstance(framework, Framework):
            raise TypeError(f"{offered!r} is no subclass of Framework")
        if framework.name != point.name:
            raise TypeError(f"the name of its class is {framework.name!r}")
    except FrameworkNotInstalledError:
        raise
    except (Exception, SystemExit) as error:  # the code of others may raise anything
        package = point.dist.name if point.dist is not None else package_of(point)
        raise FrameworkNotInstalledError(
            f"{point.name} is offered by the package {package}, whose entry point {point.name} ="
            f" {point.value} in the group {GROUP} fails to load: {told(error)}. Update that package,"
            f" pip install --upgrade {package}, or uninstall it: pip uninstall {package}.",
            target_type=point.name,
            reason=told(error),
        ) from error
    return framework
