"""What the checks of ``arraybridge doctor`` look at, and what they find.

Nothing here runs or imports a framework; `arraybridge.cli.doctor` gathers the facts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

__all__ = [
    "CUPYS",
    "CUPY_MAJORS",
    "TENSORFLOWS",
    "Card",
    "Distribution",
    "Driver",
    "Facts",
    "Problem",
    "canonical",
    "cupy_wheel",
    "jax_plugins",
    "major",
]

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Problem:
    """A fault and its fix.

    Attributes:
        id: a name that stays, for programs: ``"two-cupys"``.
        severity: ``"error"``: something does not work; ``"warning"``: it will fail or waste later;
            ``"note"``: worth knowing.
        framework: whose it is, or ``""``.
        message: what is wrong, in a sentence or two.
        fix: shell commands, in order; a line that begins with ``#`` says what to edit by hand.
    """

    id: str
    severity: Severity
    framework: str
    message: str
    fix: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Card:
    """An NVIDIA card as nvidia-smi tells; memory in MiB."""

    index: int
    name: str
    uuid: str
    total_mib: int | None
    free_mib: int | None


@dataclass(frozen=True, slots=True)
class Driver:
    """The NVIDIA driver: its version, the newest CUDA that it runs, its cards; ``error`` if it fails."""

    version: str | None = None
    cuda: str | None = None
    cards: tuple[Card, ...] = ()
    error: str | None = None

    @property
    def cuda_major(self) -> int | None:
        return major(self.cuda)


@dataclass(frozen=True, slots=True)
class Distribution:
    """An installed package: its version and the lines of its ``Requires-Dist``."""

    name: str
    version: str
    requires: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that the checks look at.

    ``inspections``: by framework, what `arraybridge.cli.inspect` answered, with a ``"state"`` beside it.
    """

    environ: Mapping[str, str]
    distributions: Mapping[str, Distribution]
    driver: Driver = field(default_factory=Driver)
    inspections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    start_method: str = "spawn"
    folder: Path = field(default_factory=Path.cwd)

    def installed(self, *names: str) -> list[str]:
        """Those of the distributions that are installed."""
        return [name for name in names if name in self.distributions]

    def built_for(self, framework: str) -> str | None:
        """The CUDA that a framework was built for, ``"13.0"``, or None."""
        if framework == "jax":
            majors = jax_plugins(self)
            return str(max(majors)) if majors else None
        if framework == "cupy":
            wheel = next((CUPY_MAJORS[name] for name in self.installed(*CUPY_MAJORS)), None)
            return None if wheel is None else str(wheel)
        value = self.inspections.get(framework, {}).get("cuda")
        return None if value is None else str(value)


def canonical(name: str) -> str:
    """A distribution's name as package tools compare it.

    >>> canonical("ml_dtypes")
    'ml-dtypes'
    """
    return re.sub(r"[-_.]+", "-", name).lower()


def major(version: str | None) -> int | None:
    """The first number of a version, or None."""
    match = re.match(r"\d+", version or "")
    return int(match.group()) if match else None


CUPY_MAJORS = {f"cupy-cuda{major}x": major for major in (11, 12, 13, 14)}
CUPYS = ("cupy", *CUPY_MAJORS, "cupy-rocm-5-0", "cupy-rocm-6-0", "cupy-rocm-7-0")
TENSORFLOWS = ("tensorflow", "tensorflow-cpu", "tf-nightly", "intel-tensorflow")


def jax_plugins(facts: Facts) -> list[int]:
    """CUDA majors of the JAX plug-ins that are installed."""
    found = (re.fullmatch(r"jax-cuda(\d+)-plugin", name) for name in facts.distributions)
    return sorted(int(match.group(1)) for match in found if match)


def cupy_wheel(facts: Facts) -> str:
    """The CuPy wheel that suits the driver."""
    fitting = [m for m in CUPY_MAJORS.values() if m <= min(facts.driver.cuda_major or 13, 13)]
    return f"cupy-cuda{max(fitting, default=12)}x"
