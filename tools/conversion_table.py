"""Writes the table of pairs into README.md and docs/conversion-table.md, from the table in the code.

python tools/conversion_table.py           rewrites the part of each file between the two marks
python tools/conversion_table.py --check   changes nothing, and exits with 1 where one is out of date
"""

from __future__ import annotations

import sys
from pathlib import Path

from arraybridge.conversion.table import FRAMEWORKS, cell

CHECKOUT = Path(__file__).parent.parent
README = CHECKOUT / "README.md"
PAGE = CHECKOUT / "docs" / "conversion-table.md"
# A source distribution has no docs beside the README.
PAGES = [README, PAGE] if PAGE.is_file() else [README]
BEGIN = "<!-- conversion table: begin -->"
END = "<!-- conversion table: end -->"

# What each route means on the host and on a card, in a word or two.
_WORDS = {
    "same": "–",
    "view": "shared",
    "dlpack": "shared",
    "device": "one copy",
    "host": "one copy",
}
# CuPy has no host arrays: with a framework that reaches its card it shares the memory of the card.
_ON_CARD = " on the card"


def cell_text(source: str, target: str) -> str:
    """What the table says of a pair."""
    route = cell(source, target).__name__
    words = _WORDS[route]
    if route == "host" and target in ("cupy", "pyclesperanto"):
        words = "two copies"  # out of one device, and into the other
    if route == "dlpack" and "cupy" in (source, target):
        words += _ON_CARD
    return words if route == "same" else f"{words} (`{route}`)"


def markdown(names: tuple[str, ...] = FRAMEWORKS) -> str:
    """The table as GitHub shows it: sources down, targets across."""
    lines = ["| from \\ to | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for source in names:
        cells = (cell_text(source, target) for target in names)
        lines.append(f"| **{source}** | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def updated(text: str) -> str:
    """``text`` with the part between the marks written anew.

    Raises:
        ValueError: a mark is missing.
    """
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return f"{text[:begin]}\n{markdown()}\n{text[end:]}"


def main() -> int:
    """Rewrite or check the files; returns the exit status."""
    check = "--check" in sys.argv[1:]
    stale = 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        new = updated(text)
        if check and new != text:
            print(f"{page.relative_to(CHECKOUT).as_posix()} is out of date; run without --check.")
            stale = 1
        elif not check:
            page.write_text(new, encoding="utf-8")
    if check and not stale:
        print("README.md is current.")
    return stale


if __name__ == "__main__":
    sys.exit(main())
