"""What can be wrong with an installation: each check looks at the facts and names the fault and its fix.

The checks run nothing and import no framework; `arraybridge.cli.doctor` gathers the facts.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

__all__ = [
    "CHECKS",
    "CUPYS",
    "TENSORFLOWS",
    "Card",
    "Distribution",
    "Driver",
    "Facts",
    "Problem",
    "canonical",
    "find_problems",
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
_INSTALL = {
    "torch": 'pip install --force-reinstall "arraybridge[torch]"',
    "jax": 'pip install --force-reinstall "arraybridge[jax]"',
    "tensorflow": 'pip install --force-reinstall "arraybridge[tensorflow]"',
    "pyclesperanto": 'pip install --force-reinstall "arraybridge[pyclesperanto]"',
    "numpy": "pip install --force-reinstall numpy",
}


def jax_plugins(facts: Facts) -> list[int]:
    """CUDA majors of the JAX plug-ins that are installed."""
    found = (re.fullmatch(r"jax-cuda(\d+)-plugin", name) for name in facts.distributions)
    return sorted(int(match.group(1)) for match in found if match)


def _cupy_wheel(facts: Facts) -> str:
    """The CuPy wheel that suits the driver."""
    fitting = [m for m in CUPY_MAJORS.values() if m <= min(facts.driver.cuda_major or 13, 13)]
    return f"cupy-cuda{max(fitting, default=12)}x"


# -- the card and its driver -------------------------------------------------------------------------


def driver_fails(facts: Facts) -> Iterator[Problem]:
    """nvidia-smi is there and does not answer."""
    if facts.driver.error is not None:
        fix = ("sudo reboot",) if "mismatch" in facts.driver.error else ("nvidia-smi",)
        yield Problem(
            "driver-fails",
            "error",
            "",
            f"The NVIDIA driver does not answer: {facts.driver.error}."
            " No framework can use a card until it does.",
            fix,
        )


def driver_too_old(facts: Facts) -> Iterator[Problem]:
    """A build for a newer CUDA than the driver runs."""
    for framework in ("torch", "jax", "tensorflow"):
        built, runs = major(facts.built_for(framework)), facts.driver.cuda_major
        if built is None or runs is None or built <= runs:
            continue
        fix: tuple[str, ...] = ("# or update the NVIDIA driver to one that runs CUDA " + str(built),)
        if framework == "jax":
            plugins = f"jax-cuda{built}-plugin jax-cuda{built}-pjrt"
            fix = (f"pip uninstall -y {plugins}", f'pip install "jax[cuda{runs}]"', *fix)
        else:
            fix = (f"# install a build of {framework} for CUDA {runs}", *fix)
        yield Problem(
            "driver-too-old",
            "error",
            framework,
            f"{framework} was built for CUDA {built}, and the driver {facts.driver.version or ''} runs CUDA"
            f" {facts.driver.cuda} at most: it won't use the card.",
            fix,
        )


def cupy_cuda_major(facts: Facts) -> Iterator[Problem]:
    """A CuPy wheel for another CUDA than the driver's."""
    runs = facts.driver.cuda_major
    for name in facts.installed(*CUPY_MAJORS):
        built = CUPY_MAJORS[name]
        if runs is None or built == runs:
            continue
        too_new = built > runs
        why = (
            "every allocation will fail"
            if too_new
            else f"it needs the libraries of CUDA {built}, which may be missing, and loads them beside those"
            f" of frameworks for CUDA {runs}"
        )
        yield Problem(
            "cupy-cuda-major",
            "error" if too_new else "warning",
            "cupy",
            f"{name} is for CUDA {built}, and the driver runs CUDA {facts.driver.cuda}: {why}.",
            (f"pip uninstall -y {name}", f"pip install {_cupy_wheel(facts)}"),
        )


def hidden_cards(facts: Facts) -> Iterator[Problem]:
    """CUDA_VISIBLE_DEVICES hides the cards, or names one that is not there."""
    value, count = facts.environ.get("CUDA_VISIBLE_DEVICES"), len(facts.driver.cards)
    if value is None or not count:
        return
    words = [word.strip() for word in value.split(",")]
    unknown = [word for word in words if word.isdigit() and int(word) >= count]
    first = words[0]
    if first in ("", "-1", "none", "NoDevFiles") or unknown:
        what = (
            f"names the card {unknown[0]}, but there are only {count}: that one and those after it are hidden"
            if unknown
            else "hides every card"
        )
        yield Problem(
            "cards-hidden",
            "warning",
            "",
            f"CUDA_VISIBLE_DEVICES={value!r} {what}.",
            ("unset CUDA_VISIBLE_DEVICES",),
        )


# -- builds ------------------------------------------------------------------------------------------


def two_cupys(facts: Facts) -> Iterator[Problem]:
    """Two packages that bring the same files."""
    for framework, family, keep in (
        ("cupy", CUPYS, _cupy_wheel(facts)),
        ("tensorflow", TENSORFLOWS, "tensorflow" if facts.driver.cards else "tensorflow-cpu"),
    ):
        both = facts.installed(*family)
        if len(both) > 1:
            yield Problem(
                f"two-{framework}s",
                "error",
                framework,
                f"{' and '.join(both)} are installed at once: they bring the same files, so that what is"
                " imported is a mixture of them. Removing one breaks the other; remove all and install one.",
                (f"pip uninstall -y {' '.join(both)}", f"pip install {keep}"),
            )


def cpu_builds(facts: Facts) -> Iterator[Problem]:
    """A build without CUDA beside a card."""
    if not facts.driver.cards:
        return
    card = facts.driver.cards[0].name
    for framework in ("torch", "jax", "tensorflow"):
        seen = facts.inspections.get(framework, {})
        if seen.get("state") not in ("works", "broken", "no device") or not seen.get("version"):
            continue
        if facts.built_for(framework) is not None or seen.get("rocm"):
            continue
        if any(device["device"].startswith("gpu") for device in seen.get("devices", ())):
            continue
        runs = min(facts.driver.cuda_major or 13, 13)
        fix: tuple[str, ...] = {
            "torch": ("pip uninstall -y torch", "pip install --no-cache-dir torch"),
            "jax": (f'pip install "jax[cuda{max(runs, 12)}]"',),
            "tensorflow": (
                f"pip uninstall -y {' '.join(facts.installed(*TENSORFLOWS)) or 'tensorflow'}",
                'pip install "tensorflow[and-cuda]"',
            ),
        }[framework]
        yield Problem(
            "cpu-build",
            "warning",
            framework,
            f"{framework} {seen['version']} is a build for the CPU: it can't use the {card} that is here.",
            fix,
        )


def jax_plugin_versions(facts: Facts) -> Iterator[Problem]:
    """A CUDA plug-in that this jaxlib does not load, or two plug-ins at once."""
    majors = jax_plugins(facts)
    if len(majors) > 1:
        keep = max((m for m in majors if m <= (facts.driver.cuda_major or 99)), default=majors[-1])
        drop = [m for m in majors if m != keep]
        names = " ".join(f"jax-cuda{m}-plugin jax-cuda{m}-pjrt" for m in drop)
        yield Problem(
            "two-jax-plugins",
            "error",
            "jax",
            f"the JAX plug-ins for CUDA {' and '.join(map(str, majors))} are installed at once, and"
            " both register as the platform cuda.",
            (f"pip uninstall -y {names}",),
        )
    jaxlib = facts.distributions.get("jaxlib")
    for cuda in majors:
        plugin = facts.distributions[f"jax-cuda{cuda}-plugin"]
        if jaxlib is not None and plugin.version != jaxlib.version:
            yield Problem(
                "jax-plugin-version",
                "warning",
                "jax",
                f"{plugin.name} {plugin.version} does not belong to jaxlib {jaxlib.version}: JAX leaves it"
                " out and computes on the CPU.",
                (f'pip install --upgrade "jax[cuda{cuda}]"',),
            )


# -- environment variables ---------------------------------------------------------------------------

_OLD_NAMES = {
    # old name: (new name, the framework that reads it, since which release)
    "XLA_PYTHON_CLIENT_MEM_FRACTION": ("XLA_CLIENT_MEM_FRACTION", "jax", (0, 6)),
    "JAX_PLATFORM_NAME": ("JAX_PLATFORMS", "jax", (0, 4)),
    "PYTORCH_CUDA_ALLOC_CONF": ("PYTORCH_ALLOC_CONF", "torch", (2, 9)),
}
_NOBODY_READS = {
    "XLA_CLIENT_PREALLOCATE": ("XLA_PYTHON_CLIENT_PREALLOCATE", "jax"),
    "XLA_PREALLOCATE": ("XLA_PYTHON_CLIENT_PREALLOCATE", "jax"),
    "JAX_PREALLOCATE": ("XLA_PYTHON_CLIENT_PREALLOCATE", "jax"),
    "XLA_CLIENT_ALLOCATOR": ("XLA_PYTHON_CLIENT_ALLOCATOR", "jax"),
    "JAX_MEM_FRACTION": ("XLA_CLIENT_MEM_FRACTION", "jax"),
    "TF_GPU_ALLOW_GROWTH": ("TF_FORCE_GPU_ALLOW_GROWTH", "tensorflow"),
    "TF_ALLOW_GROWTH": ("TF_FORCE_GPU_ALLOW_GROWTH", "tensorflow"),
    "TF_FORCE_ALLOW_GROWTH": ("TF_FORCE_GPU_ALLOW_GROWTH", "tensorflow"),
    "CUDA_VISIBLE_DEVICE": ("CUDA_VISIBLE_DEVICES", ""),
}
_ALLOCATORS = ("default", "platform", "bfc", "cuda_async", "vmm")


def _release(facts: Facts, name: str) -> tuple[int, ...]:
    numbers = re.findall(r"\d+", facts.distributions[name].version) if name in facts.distributions else []
    return tuple(map(int, numbers[:2]))


def old_variables(facts: Facts) -> Iterator[Problem]:
    """Variables under names that have been replaced, or that nobody reads."""
    for old, (new, framework, since) in _OLD_NAMES.items():
        value = facts.environ.get(old)
        if not value or _release(facts, framework) < since:
            continue
        rename = (f"unset {old}", f"export {new}={value}")
        if new in facts.environ:
            refuses = old == "XLA_PYTHON_CLIENT_MEM_FRACTION"
            yield Problem(
                "both-names",
                "error" if refuses else "warning",
                framework,
                f"{old} and {new}, its new name, are both set: "
                + (f"{framework} refuses to start on a card." if refuses else "only one is heeded."),
                (f"unset {old}",),
            )
        else:
            yield Problem(
                "old-variable",
                "warning",
                framework,
                f"{old} is an old name that {framework} is dropping; it is called {new} now.",
                rename,
            )
    for wrong, (right, framework) in _NOBODY_READS.items():
        value = facts.environ.get(wrong)
        if value is not None:
            yield Problem(
                "unread-variable",
                "warning",
                framework,
                f"{wrong} is set, but nothing reads a variable of that name; {right} is meant.",
                (f"unset {wrong}", f"export {right}={value}"),
            )


def wrong_values(facts: Facts) -> Iterator[Problem]:
    """Variables with a value that their reader refuses."""
    allocator = facts.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR")
    if allocator and allocator.lower() not in _ALLOCATORS:
        yield Problem(
            "wrong-value",
            "error",
            "jax",
            f"XLA_PYTHON_CLIENT_ALLOCATOR={allocator!r} is none of {', '.join(_ALLOCATORS)}: JAX refuses to"
            " start on a card.",
            ("unset XLA_PYTHON_CLIENT_ALLOCATOR",),
        )
    missing_gpu = facts.environ.get("ARRAYBRIDGE_MISSING_GPU")
    if missing_gpu and missing_gpu not in ("error", "host"):
        yield Problem(
            "wrong-value",
            "error",
            "",
            f"ARRAYBRIDGE_MISSING_GPU={missing_gpu!r} must be 'error' or 'host'.",
            ("unset ARRAYBRIDGE_MISSING_GPU",),
        )
    platforms = facts.environ.get("JAX_PLATFORMS") or facts.environ.get("JAX_PLATFORM_NAME") or ""
    if platforms and facts.driver.cards and facts.built_for("jax") and not re.search("cuda|gpu", platforms):
        yield Problem(
            "card-not-for-jax",
            "warning",
            "jax",
            f"JAX_PLATFORMS={platforms!r} keeps JAX off the card that is here.",
            ("unset JAX_PLATFORMS JAX_PLATFORM_NAME",),
        )


def whole_card(facts: Facts) -> Iterator[Problem]:
    """JAX and TensorFlow take the card's whole memory at their first use, unless told not to."""
    if not facts.driver.cards:
        return
    environ = facts.environ
    frugal = environ.get("XLA_PYTHON_CLIENT_PREALLOCATE") in ("false", "False", "0")
    by_need = environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "").lower() == "platform"
    if facts.built_for("jax") and not (frugal or by_need):
        share = environ.get("XLA_CLIENT_MEM_FRACTION") or environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION")
        yield Problem(
            "jax-takes-card",
            "warning",
            "jax",
            f"JAX takes {share or '0.75'} of a card's memory at its first use, and leaves the rest to the"
            " others. (In a program, call arraybridge.coexist() first.)",
            ("export XLA_PYTHON_CLIENT_PREALLOCATE=false",),
        )
    if facts.built_for("tensorflow") and environ.get("TF_FORCE_GPU_ALLOW_GROWTH", "").lower() != "true":
        yield Problem(
            "tensorflow-takes-card",
            "warning",
            "tensorflow",
            "TensorFlow takes nearly all memory of every card at its first use."
            " (In a program, call arraybridge.coexist() first.)",
            ("export TF_FORCE_GPU_ALLOW_GROWTH=true",),
        )


def library_path(facts: Facts) -> Iterator[Problem]:
    """Libraries on LD_LIBRARY_PATH that come before those which the frameworks bring."""
    folders = [folder for folder in facts.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    for folder in folders:
        place = Path(folder)
        for library in ("libcudnn", "libnccl"):
            if place.is_dir() and any(place.glob(f"{library}.so*")):
                if not any(n.startswith("nvidia-") for n in facts.distributions):
                    continue
                yield Problem(
                    "library-path",
                    "warning",
                    "",
                    f"LD_LIBRARY_PATH has {folder} with a {library} of its own, which is loaded in place"
                    " of the one that each framework was installed with.",
                    (f"export LD_LIBRARY_PATH={shlex.quote(':'.join(f for f in folders if f != folder))}",),
                )


def fork(facts: Facts) -> Iterator[Problem]:
    """The default way of starting processes does not go together with CUDA."""
    if facts.driver.cards and facts.start_method == "fork":
        yield Problem(
            "fork-after-cuda",
            "note",
            "",
            "multiprocessing starts processes by fork here. A process forked after CUDA was first used can't"
            " use the card; have multiprocessing spawn them.",
            ('# at the start of the program: multiprocessing.set_start_method("spawn")',),
        )


# -- requirements ------------------------------------------------------------------------------------

_ROOTS = frozenset(
    {"arraybridge", "torch", "jax", "jaxlib", "ml-dtypes", "pyopencl", "pyclesperanto", *CUPYS, *TENSORFLOWS}
)
Wants = dict[str, dict[str, "SpecifierSet"]]


def _wants(facts: Facts) -> Wants:
    """For each distribution that matters, who wants which versions of it."""
    from packaging.requirements import InvalidRequirement, Requirement

    wants: Wants = {}
    for source in facts.distributions.values():
        for line in source.requires:
            try:
                requirement = Requirement(line)
            except InvalidRequirement:
                continue
            target = canonical(requirement.name)
            # The pins of CUDA libraries stand under extras. A JAX plug-in's is meant where both packages are
            # there; a TensorFlow may have been installed without (see _refused), and one for the CPU is.
            extras = ["", *(["with-cuda"] if source.name.startswith("jax-cuda") else [])]
            extras += ["and-cuda"] if source.name == "tensorflow" else []
            if requirement.marker is None or any(requirement.marker.evaluate({"extra": e}) for e in extras):
                known = wants.setdefault(target, {})
                known[source.name] = known.get(source.name, requirement.specifier) & requirement.specifier
    return wants


def _common(one: SpecifierSet, other: SpecifierSet) -> bool:
    """Whether a version exists that both accept."""
    both = one & other
    candidates = {"0", "99999"}
    for specifier in both:
        version = specifier.version.removesuffix(".*")
        numbers = [int(n) for n in re.findall(r"\d+", version)[:3]]
        # The bound itself, something just above it, and something just below.
        candidates |= {version, f"{version}.1", f"{version}.post1"}
        for place, number in enumerate(numbers):
            if number:
                below = [*numbers[:place], number - 1, 9999]
                candidates.add(".".join(map(str, below)))
    return any(both.contains(candidate, prereleases=True) for candidate in candidates)


def requirements(facts: Facts) -> Iterator[Problem]:
    """Packages that are installed in versions which others refuse."""
    if importlib.util.find_spec("packaging") is None:
        yield Problem(
            "no-packaging",
            "note",
            "",
            "The requirements of the installed packages were not compared: the package packaging is missing.",
            ("pip install packaging",),
        )
        return
    for target, wanted in _wants(facts).items():
        has = facts.distributions.get(target)
        if has is None:
            missing = [name for name in wanted if name in _ROOTS]
            if missing and not target.startswith("nvidia-"):
                yield Problem(
                    "requirement-missing",
                    "warning",
                    "",
                    f"{' and '.join(missing)} needs {target}, which is not installed.",
                    (f'pip install "{target}{wanted[missing[0]]}"',),
                )
            continue
        relevant = target == "numpy" or target.startswith("nvidia-")
        refusing = [
            name
            for name, spec in wanted.items()
            if (relevant or name in _ROOTS) and not spec.contains(has.version, prereleases=True)
        ]
        for name in refusing:
            yield _refused(has, name, wanted)


def _refused(has: Distribution, name: str, wanted: dict[str, SpecifierSet]) -> Problem:
    target, spec = has.name, wanted[name]
    rival = next((other for other, its in wanted.items() if other != name and not _common(spec, its)), None)
    kind = "numpy" if target == "numpy" else "cuda" if target.startswith("nvidia-") else "requirement"
    # Whether TensorFlow's extra was asked for is not recorded: its pins of CUDA libraries are a warning.
    unsure = kind == "cuda" and "tensorflow" in (name, rival)
    if rival is not None:
        return Problem(
            f"{kind}-pins",
            "warning" if unsure else "error",
            "",
            f"{name} needs {target}{spec} and {rival} needs {target}{wanted[rival]}: no version serves both,"
            f" and {has.version} is installed. They need an environment each.",
            (f"pip uninstall -y {name}", f"python -m venv {name}-env", f"{name}-env/bin/pip install {name}"),
        )
    together = spec
    for its in wanted.values():
        if _common(together, its):
            together &= its
    serious = kind != "requirement" or {name, target} == {"jax", "jaxlib"}
    return Problem(
        f"{kind}-version",
        "error" if serious and not unsure else "warning",
        "",
        f"{name} needs {target}{spec}, but {has.version} is installed.",
        (f'pip install "{target}{together}"',),
    )


def two_cuda_libraries(facts: Facts) -> Iterator[Problem]:
    """Libraries for two majors of CUDA: they share a file name, and the first one loaded serves all."""
    for library in ("cudnn", "nccl"):
        both = sorted(n for n in facts.distributions if re.fullmatch(rf"nvidia-{library}-cu\d+", n))
        if len(both) < 2:
            continue
        users = {
            package: sorted(d.name for d in facts.distributions.values() if _names(d, package))
            for package in both
        }
        told = "; ".join(
            f"{p} {facts.distributions[p].version} for {', '.join(u) or 'nobody'}" for p, u in users.items()
        )
        runs = facts.driver.cuda_major or 13
        drop = (
            [p for p in both if not users[p]] or [p for p in both if not p.endswith(f"-cu{runs}")] or both[:1]
        )
        fix: list[str] = []
        for package in drop:
            cuda = package.rpartition("-cu")[2]
            other = next(p for p in both if p != package).rpartition("-cu")[2]
            if f"jax-cuda{cuda}-plugin" in facts.distributions:
                fix += [
                    f"pip uninstall -y jax-cuda{cuda}-plugin jax-cuda{cuda}-pjrt",
                    f'pip install "jax[cuda{other}]"',
                ]
            fix.append(f"pip uninstall -y {package}")
        yield Problem(
            "two-cuda-libraries",
            "warning",
            "",
            f"{library} is installed for two CUDAs ({told}). Both have one file name: the"
            " framework that is imported second gets the other's library. Bring all frameworks to one CUDA.",
            tuple(fix),
        )


def _names(distribution: Distribution, package: str) -> bool:
    return any(
        canonical(re.split(r"[^\w.-]", line, maxsplit=1)[0]) == package for line in distribution.requires
    )


# -- what the inspections found ----------------------------------------------------------------------


def broken(facts: Facts) -> Iterator[Problem]:
    """Frameworks that don't work, each with what it said."""
    for name, seen in facts.inspections.items():
        state, error = seen.get("state"), seen.get("error")
        install = (_INSTALL.get(name, f"pip install --force-reinstall {_cupy_wheel(facts)}"),)
        if state == "no device" and name == "pyclesperanto":
            yield Problem(
                "no-opencl",
                "error",
                name,
                "pyclesperanto finds no OpenCL device. On a card, install its driver with OpenCL; on the CPU,"
                " PoCL serves.",
                ('pip install "pyopencl[pocl]"',),
            )
        elif state == "no device":
            card = bool(facts.driver.cards)
            yield Problem(
                "no-device",
                "error" if card else "note",
                name,
                f"{name} finds no device that it can use: {error}",
                install if card else (),
            )
        elif state in ("crashed", "timed out", "broken"):
            what = {"crashed": "ends the process", "timed out": "hangs", "broken": "does not work"}[state]
            yield Problem(
                f"framework-{state.replace(' ', '-')}", "error", name, f"{name} {what}: {error}", install
            )


def shadowed(facts: Facts) -> Iterator[Problem]:
    """A file of the user's own that is imported in place of a framework."""
    for name, seen in facts.inspections.items():
        origin = seen.get("origin")
        if origin is not None and Path(origin) in (
            (facts.folder / f"{name}.py").resolve(),
            (facts.folder / name / "__init__.py").resolve(),
        ):
            yield Problem(
                "shadowed",
                "error",
                name,
                f"{origin} is imported in place of {name}, because it stands in the folder of the program.",
                (f"mv {shlex.quote(origin)} {shlex.quote(str(Path(origin).with_name(f'my_{name}.py')))}",)
                if origin.endswith(f"{name}.py")
                else (f"# rename the folder {Path(origin).parent}",),
            )


CHECKS: tuple[Callable[[Facts], Iterator[Problem]], ...] = (
    driver_fails,
    driver_too_old,
    cupy_cuda_major,
    hidden_cards,
    two_cupys,
    cpu_builds,
    jax_plugin_versions,
    requirements,
    two_cuda_libraries,
    broken,
    shadowed,
    old_variables,
    wrong_values,
    whole_card,
    library_path,
    fork,
)


def find_problems(facts: Facts) -> list[Problem]:
    """All faults, the worst first."""
    found = [problem for check in CHECKS for problem in check(facts)]
    return sorted(found, key=lambda problem: ("error", "warning", "note").index(problem.severity))
