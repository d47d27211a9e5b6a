"""Faults between packages: versions that others refuse, and libraries that are there twice.

What a requirement means, and whether two of them leave a version, is asked of ``packaging``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from arraybridge.cli.facts import CUPYS, TENSORFLOWS, Distribution, Facts, Problem, canonical

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

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


def requirements(facts: Facts) -> Iterator[Problem]:
    """Packages that are installed in versions which others refuse."""
    try:
        from packaging.specifiers import SpecifierSet
    except ImportError:
        comparable = False
    else:
        comparable = hasattr(SpecifierSet, "is_unsatisfiable")  # older ones can't tell what has no version
    if not comparable:
        yield Problem(
            "no-packaging",
            "note",
            "",
            "The requirements of the installed packages were not compared: the package packaging is missing"
            " or old.",
            ("pip install --upgrade packaging",),
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
        for name, spec in wanted.items():
            if (relevant or name in _ROOTS) and not spec.contains(has.version, prereleases=True):
                yield _refused(has, name, wanted)


def _refused(has: Distribution, name: str, wanted: dict[str, SpecifierSet]) -> Problem:
    target, spec = has.name, wanted[name]
    rival = next(
        (other for other, its in wanted.items() if other != name and (spec & its).is_unsatisfiable()), None
    )
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
        if not (together & its).is_unsatisfiable():
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
