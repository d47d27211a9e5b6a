"""Ask the peer, arraybridge 0.5.2, to convert objects, in a separate process: it has the same import name.

    python -m benchmarks.peer benchmarks.sparse FOLDER   # prints the answers as JSON; FOLDER has the peer

The module has a function ``questions``, which returns name → (object, source, target).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def answer_of(peer: Any, x: Any, source: str, target: str) -> str:
    """Convert an object, and return the class of the result or of the error as text."""
    try:
        result = peer.convert_memory(x, source, target, peer.HOST)
    except Exception as error:  # noqa: BLE001  # any error is an answer
        return f"raises {type(error).__name__}"
    name = type(result).__name__
    return f"returns the {name} itself" if result is x else f"returns a {name}"


def ask(module: str, folder: str) -> dict[str, str]:
    """Return the peer's answers to the questions of a module, by name."""
    command = [sys.executable, "-m", "benchmarks.peer", module, folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options ``--peer`` and ``--without peer`` to a benchmark."""
    default = Path(tempfile.gettempdir()) / "arraybridge-peer"
    parser.add_argument("--peer", type=Path, default=default, help="folder of arraybridge==0.5.2")
    parser.add_argument("--without", choices=("peer",), help="skip this contender")


def answers_for(module: str, arguments: argparse.Namespace) -> dict[str, str]:
    """Return the answers of the peer, which is installed if it is missing; none with ``--without peer``."""
    if arguments.without == "peer":
        return {}
    from benchmarks.conversion import peer_folder

    return ask(module, peer_folder(arguments.peer))


def main() -> None:
    module, folder = sys.argv[1:]
    sys.path.insert(0, folder)
    peer = importlib.import_module("arraybridge")
    with contextlib.redirect_stdout(sys.stderr):
        questions = importlib.import_module(module).questions()
        answers = {name: answer_of(peer, *question) for name, question in questions.items()}
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
