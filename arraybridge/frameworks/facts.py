"""What is known of a framework without importing it: its own file, which imports it, cannot be asked."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType

__all__ = ["BUILT_IN", "can_find", "how_to_install", "install_command", "is_imported"]


@dataclass(slots=True, eq=False, repr=False)
class Facts:
    """What may be asked of a framework that nobody has imported. A plug-in sets `Framework.facts`, if at all.

    Attributes:
        name: how users name it.
        packages: what ``import`` takes, the preferred one first; ``(name,)`` where empty.
        modules: root modules in which the types of its arrays are defined; ``packages`` where empty.
        distributions: what brings it, as package indexes call it; ``packages`` where empty.
        extra: the extra of arraybridge that installs it, or ``""``.
        requirements: what to install, as pip takes it; the first of ``distributions`` where empty.
        runs_numpy_code: whether functions written for NumPy run on its arrays: True where ``@gpu``,
            `array_namespace` and `compare` may choose it, None where ``@gpu`` takes it by name alone, False
            where it never does. The first in the list is the nearest to NumPy.
        libraries: parts of paths by which one sees that a process has loaded it.
        nicknames: what people call it in code; not accepted, but understood by suggestions.
    """

    name: str
    packages: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    distributions: tuple[str, ...] = ()
    extra: str = ""
    requirements: tuple[str, ...] = ()
    runs_numpy_code: bool | None = None
    libraries: tuple[str, ...] = ()
    nicknames: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.packages = self.packages or (self.name,)
        self.modules = self.modules or self.packages
        self.distributions = self.distributions or self.packages
        self.requirements = self.requirements or self.distributions[:1]


BUILT_IN = {
    one.name: one
    for one in (
        Facts("numpy", requirements=("numpy>=1.26",), runs_numpy_code=False, nicknames=("np",)),
        Facts(
            "cupy",
            distributions=("cupy", "cupy-cuda13x", "cupy-cuda12x"),
            extra="cupy-cuda13x",
            requirements=("cupy-cuda13x>=13.6",),
            runs_numpy_code=True,
            libraries=("/cupy/", "/cupy_backends/"),
            nicknames=("cp",),
        ),
        Facts(
            "torch",
            extra="torch",
            requirements=("torch>=2.6",),
            runs_numpy_code=True,
            libraries=("/torch/lib/",),
            nicknames=("pytorch",),
        ),
        Facts(
            "jax",
            modules=("jax", "jaxlib"),
            extra="jax",
            requirements=("jax>=0.7",),
            runs_numpy_code=True,
            libraries=("/jaxlib/",),
            nicknames=("jnp",),
        ),
        Facts(
            "tensorflow",
            distributions=("tensorflow", "tensorflow-cpu"),
            extra="tensorflow",
            requirements=("tensorflow>=2.19",),
            runs_numpy_code=False,
            libraries=("/tensorflow/",),
            nicknames=("tf", "keras"),
        ),
        Facts(
            "pyclesperanto",
            packages=("pyclesperanto", "pyclesperanto_prototype"),
            modules=(
                *("pyclesperanto", "pyclesperanto_opencl", "pyclesperanto_cuda", "pyclesperanto_metal"),
                "pyclesperanto_prototype",
            ),
            distributions=("pyclesperanto", "pyclesperanto-prototype"),
            extra="pyclesperanto",
            requirements=("pyclesperanto>=0.25", "pyopencl[pocl]>=2025.1"),
            runs_numpy_code=False,
            libraries=("/pyclesperanto", "/pyopencl/"),
            nicknames=("cle", "opencl"),
        ),
        Facts("mlx", extra="mlx", requirements=("mlx>=0.30",), libraries=("/mlx/",)),
        Facts(
            "paddle",
            distributions=("paddlepaddle", "paddlepaddle-gpu"),
            extra="paddle",
            requirements=("paddlepaddle>=3.3",),
            libraries=("/paddle/",),
        ),
    )
}


def install_command(facts: Facts, *options: str) -> str:
    """The command that installs a framework in a release that arraybridge works with."""
    return " ".join(("pip install", *options, *(f'"{one}"' for one in facts.requirements)))


def how_to_install(facts: Facts, *options: str) -> str:
    """What to run. The package index has another arraybridge: the extras are to be had from a checkout."""
    command = install_command(facts, *options)
    if facts.name == "cupy":
        command += " (for CUDA 12: cupy-cuda12x)"
    if facts.extra:
        pip = " ".join(("pip install", *options))
        command += f', or {pip} ".[{facts.extra}]" in a checkout of arraybridge'
    return command


def is_imported(*packages: str) -> bool:
    """Whether this process has imported one of them; what stands in for one in a test is no module."""
    if sys.modules.keys().isdisjoint(packages):
        return False
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
