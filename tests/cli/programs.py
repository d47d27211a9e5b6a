"""Run the program as a user does, also in temporary environments with broken packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner, Result

from arraybridge.cli.app import app

CHECKOUT = Path(__file__).parents[2]
PLANTED = Path(__file__).parent / "planted"
# Variables that a shell may have set, which would change the results.
UNSET = (
    *("COLUMNS", "NO_COLOR", "FORCE_COLOR", "TERM", "PY_COLORS", "GITHUB_ACTIONS"),
    *("XLA_FLAGS", "JAX_PLATFORMS", "XLA_PYTHON_CLIENT_PREALLOCATE", "TF_FORCE_GPU_ALLOW_GROWTH"),
    "OCL_ICD_FILENAMES",
)


def environment(*first: Path, **changes: str) -> dict[str, str]:
    """Return environment variables with which Python finds the folders in ``first``, then this checkout."""
    environ = {name: value for name, value in os.environ.items() if name not in UNSET}
    environ["PYTHONPATH"] = os.pathsep.join([*map(str, first), str(CHECKOUT)])
    environ["PYTHONWARNINGS"] = ""
    return environ | changes


def run_cli(
    *arguments: str, env: dict[str, str] | None = None, cwd: Path | None = None, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m arraybridge`` with these arguments in a separate process, through pipes."""
    return subprocess.run(
        [sys.executable, "-m", "arraybridge", *arguments],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=timeout,
        check=False,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        env=env or environment(PYTHONIOENCODING="utf-8"),
    )


def call_cli(*arguments: str, **env: str) -> Result:
    """Call the command in this process, because starting an interpreter takes half a second."""
    return CliRunner().invoke(app, arguments, prog_name="arraybridge", env={"COLUMNS": "200", **env})


def join_boxed_lines(text: str) -> str:
    """Return the text of a box that the command line prints around messages, as one line."""
    return " ".join(text.translate(str.maketrans("│╭╮╰╯─", "      ")).split())


class Site:
    """A temporary folder of packages that Python finds first, in an environment without installed frameworks.

    The variable SHOWN lists installed frameworks to keep: `site.run("doctor", SHOWN="torch")`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "site"
        self.work = folder / "work"
        for one in (self.folder, self.work):
            one.mkdir(parents=True)
        shutil.copy(PLANTED / "sitecustomize.py", self.folder)

    def package(self, name: str, text: str) -> None:
        """Add a package with this source text, or with that of a file in the folder planted/."""
        (self.folder / name).mkdir()
        if text.endswith(".py"):
            text = (PLANTED / text).read_text(encoding="utf-8")
        (self.folder / name / "__init__.py").write_text(text, encoding="utf-8")

    def distribution(self, name: str, version: str) -> None:
        """Add the metadata of an installed distribution."""
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        (info / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def run(self, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
        """Run arraybridge in this environment, in the folder ``work``."""
        return run_cli(*arguments, env=environment(self.folder, **changes), cwd=self.work)
