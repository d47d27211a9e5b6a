"""Tests of tools/check_commit_subject.py, the commit-msg hook."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers import run_python, tool

CHECKOUT = Path(__file__).parent.parent
CHECK = tool("check_commit_subject")


@pytest.mark.parametrize(
    "message",
    [
        "Accept pyarrow tables as carriers",
        "Pass options of recovery by keyword; load array_namespace when needed",
        "Process blocks in order\n\nA body.\n",
        "Fix typo\n# Comments of the template.\n",
        "Merge branch 'docs' into main",
        'Revert "Cache result converters"',
        "Add " + "y" * 68,  # 72 characters
    ],
)
def test_accepts(message: str) -> None:
    assert CHECK.faults(message) == []


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        ("", "empty"),
        ("# only a comment\n", "empty"),
        ("Add " + "y" * 69, "73 characters"),
        ("Add a table.", "period"),
        ("add a table", "lowercase"),
        ("Added a table", "'added'"),
        ("Adding a table", "'adding'"),
        ("Adds a table", "'adds'"),
        ("What comes home is known at a glance", "'what'"),
        ("The table of pairs", "'the'"),
        ("Add a table\nof pairs", "second line"),
    ],
)
def test_rejects(message: str, fault: str) -> None:
    (found,) = CHECK.faults(message)
    assert fault in found


def test_exit_status_and_output(tmp_path: Path) -> None:
    message = tmp_path / "COMMIT_EDITMSG"
    for text, status, printed in (("Add a table\n", 0, ""), ("Add a table.\n", 1, "period")):
        message.write_text(text, encoding="utf-8")
        done = run_python(str(CHECKOUT / "tools" / "check_commit_subject.py"), str(message))
        assert done.returncode == status
        assert printed in done.stdout
        assert bool(done.stdout) == bool(printed)


def test_the_template_has_comments_only() -> None:
    template = CHECKOUT / ".gitmessage"
    if not template.is_file():
        pytest.skip("a source distribution does not have the template")
    assert all(line.startswith("#") or not line for line in template.read_text("utf-8").splitlines())
    assert CHECK.faults(template.read_text("utf-8")) == ["The subject is empty."]


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_git_refuses_a_commit_whose_subject_the_hook_rejects(tmp_path: Path) -> None:
    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        who = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
        return subprocess.run(
            ["git", *who, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
        )

    assert git("init", "-q").returncode == 0
    hook = tmp_path / ".git" / "hooks" / "commit-msg"
    hook.parent.mkdir(exist_ok=True)
    script = CHECKOUT / "tools" / "check_commit_subject.py"
    hook.write_text(f'#!/bin/sh\nexec python3 "{script}" "$1"\n', encoding="utf-8")
    hook.chmod(0o755)
    assert git("commit", "--allow-empty", "-m", "Added a table").returncode != 0
    assert git("commit", "--allow-empty", "-m", "Add a table").returncode == 0
