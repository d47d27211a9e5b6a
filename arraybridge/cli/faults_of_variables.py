"""Faults of environment variables: old names, wrong values, and settings that go badly with a card."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from arraybridge.cli.facts import Facts, Problem

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
