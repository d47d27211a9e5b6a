"""What can be wrong with an installation: each check looks at the facts and names the fault and its fix.

The checks run nothing and import no framework; `arraybridge.cli.doctor` gathers the facts. Three searches
stand elsewhere: the orders of imports that crash are tried by `arraybridge.cli.doctor.try_orders`, what a
program sets too late is read by `arraybridge.cli.script_faults`, and each framework is looked at by
`arraybridge.cli.inspect`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from arraybridge.cli import faults_of_builds as builds
from arraybridge.cli import faults_of_packages as packages
from arraybridge.cli import faults_of_variables as variables
from arraybridge.cli.facts import Card, Distribution, Driver, Facts, Problem

__all__ = ["CHECKS", "Card", "Distribution", "Driver", "Facts", "Problem", "find_problems"]

CHECKS: tuple[Callable[[Facts], Iterator[Problem]], ...] = (
    builds.driver_fails,
    builds.driver_too_old,
    builds.cupy_cuda_major,
    builds.hidden_cards,
    builds.two_cupys,
    builds.cpu_builds,
    builds.jax_plugin_versions,
    packages.requirements,
    packages.two_cuda_libraries,
    builds.broken,
    builds.shadowed,
    variables.old_variables,
    variables.wrong_values,
    variables.whole_card,
    variables.library_path,
    variables.fork,
)


def find_problems(facts: Facts) -> list[Problem]:
    """All faults, the worst first."""
    found = [problem for check in CHECKS for problem in check(facts)]
    return sorted(found, key=lambda problem: ("error", "warning", "note").index(problem.severity))
