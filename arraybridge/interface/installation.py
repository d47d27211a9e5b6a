"""Functions that find the packages of classes, and check whether packages are imported or installed.

They do not import the packages.
"""

from __future__ import annotations

import sys
from types import ModuleType

from arraybridge.interface.metadata import FrameworkMetadata


def install_command(metadata: FrameworkMetadata, *options: str) -> str:
    """Return the command that installs a framework."""
    return " ".join(("pip install", *options, f'"{metadata.requirement}"'))


def how_to_install(metadata: FrameworkMetadata, *options: str) -> str:
    """Return installation instructions for a framework.

    The extras require a checkout, because the package index has another project named arraybridge.
    """
    command = install_command(metadata, *options)
    if metadata.install_note:
        command += f" ({metadata.install_note})"
    from_checkout = " ".join(("pip install", *options))
    return f'{command}, or {from_checkout} ".[{metadata.extra}]" in a checkout of arraybridge'


def package_of(cls: type) -> str:
    """Return the top-level package of a class, such as ``"torch"``."""
    return str(cls.__module__).partition(".")[0]


def packages_of(cls: type) -> dict[str, None]:
    """Return the top-level packages of a class and of its base classes, in this order."""
    # `package_of` would take 0.3 µs longer for eight base classes, and this line runs for every carrier.
    return {str(base.__module__).partition(".")[0]: None for base in cls.__mro__}


def is_imported(*packages: str) -> bool:
    """Return whether this process has imported any of the packages.

    An object that a test puts into ``sys.modules`` does not count, because it is not a module.
    """
    return any(isinstance(sys.modules.get(package), ModuleType) for package in packages)


def can_find(package: str) -> bool:
    """Return whether a top-level package is imported or can be imported."""
    if package in sys.modules:
        return is_imported(package)
    from importlib.util import find_spec  # costs 1 ms

    try:
        return find_spec(package) is not None
    except ImportError:  # raised by an import hook
        return False
