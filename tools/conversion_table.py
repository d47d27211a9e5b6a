"""Write the table of arraybridge/conversion/table.py into README.md and docs/conversion-table.md.

python tools/conversion_table.py           rewrites the part of each file between two comments
python tools/conversion_table.py --check   changes nothing, and exits with 1 if a file is out of date
"""

from __future__ import annotations

import sys
from pathlib import Path

from arraybridge.conversion.table import FRAMEWORKS, cell

CHECKOUT = Path(__file__).parent.parent
README = CHECKOUT / "README.md"
PAGE = CHECKOUT / "docs" / "conversion-table.md"
# A source distribution may lack the docs.
PAGES = [README, PAGE] if PAGE.is_file() else [README]
BEGIN = "<!-- conversion table: begin -->"
END = "<!-- conversion table: end -->"

# A short text for each route.
_TEXTS = {
    "same": "–",
    "view": "shared",
    "dlpack": "shared",
    "device": "one copy",
    "host": "one copy",
}
# CuPy has no host arrays; it shares GPU memory with frameworks on the same GPU.
_ON_GPU = " on the GPU"


def cell_text(source: str, target: str) -> str:
    """Return the text of a pair of frameworks."""
    route = cell(source, target).__name__
    text = _TEXTS[route]
    if route == "host" and target in ("cupy", "pyclesperanto"):
        text = "two copies"  # from one device to the host, and to the other device
    if route == "dlpack" and "cupy" in (source, target):
        text += _ON_GPU
    return text if route == "same" else f"{text} (`{route}`)"


def markdown(names: tuple[str, ...] = FRAMEWORKS) -> str:
    """Return the table in Markdown: a row per source, a column per target."""
    lines = ["| from \\ to | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for source in names:
        cells = (cell_text(source, target) for target in names)
        lines.append(f"| **{source}** | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def updated(text: str) -> str:
    """Return ``text`` with the table between the two comments replaced.

    Raises:
        ValueError: A comment is missing.
    """
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return f"{text[:begin]}\n{markdown()}\n{text[end:]}"


def main() -> int:
    """Rewrite or check the files; return the exit status."""
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
        print("The table is current.")
    return stale


if __name__ == "__main__":
    sys.exit(main())
