"""Faults of the driver and of the builds of the frameworks, and of frameworks that do not work at all."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from arraybridge.cli.facts import (
    CUPY_MAJORS,
    CUPYS,
    TENSORFLOWS,
    Facts,
    Problem,
    cupy_wheel,
    jax_plugins,
    major,
)
from arraybridge.frameworks import registry
from arraybridge.frameworks.facts import install_command

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
            (f"pip uninstall -y {name}", f"pip install {cupy_wheel(facts)}"),
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
        ("cupy", CUPYS, cupy_wheel(facts)),
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


# -- what the inspections found ----------------------------------------------------------------------


def broken(facts: Facts) -> Iterator[Problem]:
    """Frameworks that don't work, each with what it said."""
    for name, seen in facts.inspections.items():
        state, error = seen.get("state"), seen.get("error")
        install = (
            f"pip install --force-reinstall {cupy_wheel(facts)}"
            if name == "cupy"
            else install_command(registry.facts(name), "--force-reinstall"),
        )
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
