"""Check the subject of a commit message: imperative, capitalized, at most 72 characters.

    python tools/check_commit_subject.py .git/COMMIT_EDITMSG

A pre-commit hook of the stage commit-msg runs it. It prints each fault, and exits with 1 if there is one.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

LONGEST = 72
# Git writes these itself.
GENERATED = ("Merge ", "Revert ", "fixup! ", "squash! ", "amend! ")
# Imperatives that end like another form of a verb, separated by blanks.
IMPERATIVES = (
    "access address assess bring bypass compress cross discuss dismiss embed exceed express feed focus guess"
    " miss need pass press process proceed progress seed shed speed spread stress suppress"
)
NOT_VERBS = (
    "a all also an and any but each every for from how if in it its more new no not now of on one only or"
    " some that the these they this those to we what when where which who why with you"
)


def faults(message: str) -> list[str]:
    """Return the faults of a commit message's subject, one sentence each."""
    lines = [line for line in message.splitlines() if not line.startswith("#")]
    subject = lines[0].rstrip() if lines else ""
    if subject.startswith(GENERATED):
        return []
    if not subject:
        return ["The subject is empty."]
    found = []
    if len(subject) > LONGEST:
        found.append(f"The subject has {len(subject)} characters; shorten it to {LONGEST}.")
    if subject.endswith("."):
        found.append("The subject ends with a period; remove it.")
    if not subject[0].isupper():
        found.append("The subject starts with a lowercase letter; capitalize it.")
    word = re.split(r"[^A-Za-z-]", subject)[0].lower()
    if not _is_imperative(word):
        found.append(
            f"The subject starts with {word!r}; start with an imperative such as Add, Fix or Rename."
        )
    if len(lines) > 1 and lines[1].strip():
        found.append("The second line is not blank; separate the subject from the body.")
    return found


def _is_imperative(word: str) -> bool:
    if word in IMPERATIVES.split():
        return True
    return word.isalpha() and word not in NOT_VERBS.split() and not word.endswith(("ed", "ing", "s"))


def main() -> int:
    """Print the faults of the message in the file that is passed, and return the exit status."""
    found = faults(Path(sys.argv[1]).read_text(encoding="utf-8"))
    print("\n".join(found), end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
