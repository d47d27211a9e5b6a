"""Write the table of pairs into README.md and docs/conversion-table.md, and draw it as an image.

The source is the table in the code, arraybridge/conversion/table.py.

python tools/conversion_table.py           rewrites the part of each file between two comments, and the image
python tools/conversion_table.py --check   changes nothing, and exits with 1 if a file is out of date
"""

from __future__ import annotations

import sys
from pathlib import Path

from arraybridge.conversion.table import FRAMEWORKS, cell

CHECKOUT = Path(__file__).parent.parent
README = CHECKOUT / "README.md"
PAGE = CHECKOUT / "docs" / "conversion-table.md"
# A source distribution has a README, but no docs.
PAGES = [README, PAGE] if PAGE.is_file() else [README]
PICTURE = CHECKOUT / "docs" / "_static" / "conversion-table.svg"
BEGIN = "<!-- conversion table: begin -->"
END = "<!-- conversion table: end -->"

# The meaning of each route on the host and on a GPU.
_WORDS = {
    "same": "–",
    "view": "shared",
    "dlpack": "shared",
    "device": "one copy",
    "host": "one copy",
}
# CuPy has no host arrays. Frameworks that support its GPU share the memory of the GPU.
_ON_GPU = " on the GPU"


def cell_text(source: str, target: str) -> str:
    """Return the text of the cell for a pair of frameworks."""
    route = cell(source, target).__name__
    words = _WORDS[route]
    if route == "host" and target in ("cupy", "pyclesperanto"):
        words = "two copies"  # out of one device, and into the other
    if route == "dlpack" and "cupy" in (source, target):
        words += _ON_GPU
    return words if route == "same" else f"{words} (`{route}`)"


def markdown(names: tuple[str, ...] = FRAMEWORKS) -> str:
    """Return the table in Markdown: one row per source, one column per target."""
    lines = ["| from \\ to | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for source in names:
        cells = (cell_text(source, target) for target in names)
        lines.append(f"| **{source}** | " + " | ".join(cells) + " |")
    return "\n".join(lines)


# Position and size of the cells in the image. Colors follow the reader's light or dark mode.
_LEFT, _TOP, _WIDTH, _HEIGHT = 112, 60, 63, 34
_FONT = 'font-family="Helvetica, Arial, sans-serif" font-size="13" text-anchor="middle"'
_CLASSES = {"shared": "shared", "one copy": "one", "two copies": "two", "–": "same"}
_STYLE = """<style>
.ground { fill: #ffffff; } text { fill: #1c2733; } .note { fill: #5c636a; }
.shared { fill: #b7e4c7; } .one { fill: #ffe0a3; } .two { fill: #ffc09f; } .same { fill: #e9ecef; }
@media (prefers-color-scheme: dark) {
.ground { fill: #14181e; } text { fill: #e4e9f0; } .note { fill: #9aa7b8; }
.shared { fill: #1d5236; } .one { fill: #5c4813; } .two { fill: #6e3520; } .same { fill: #262d36; }
}
</style>"""


def _label(name: str) -> list[str]:
    """Split a long name into two lines that fit into a column."""
    return [name] if len(name) < 9 else [name[:6] + "-", name[6:]]


def picture(names: tuple[str, ...] = FRAMEWORKS) -> str:
    """Return the table as SVG, readable at a width of 360 pixels."""
    width, height = _LEFT + _WIDTH * len(names) + 8, _TOP + _HEIGHT * len(names) + 34
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" {_FONT}>',
        "<title>Which pairs of frameworks share memory, which copy</title>",
        _STYLE,
        f'<rect class="ground" width="{width}" height="{height}" rx="8"/>',
        f'<text x="{_LEFT - 8}" y="{_TOP - 12}" text-anchor="end" class="note">from \\ to</text>',
    ]
    for i, name in enumerate(names):
        middle = _LEFT + _WIDTH * i + _WIDTH // 2
        parts = _label(name)
        for j, part in enumerate(parts):
            y = _TOP - 12 - 15 * (len(parts) - 1 - j)
            lines.append(f'<text x="{middle}" y="{y}" font-weight="bold">{part}</text>')
    for row, source in enumerate(names):
        y = _TOP + _HEIGHT * row
        lines.append(
            f'<text x="{_LEFT - 8}" y="{y + 22}" text-anchor="end" font-weight="bold">{source}</text>'
        )
        for column, target in enumerate(names):
            words = cell_text(source, target).partition(" (")[0]
            kind, on_gpu, _ = words.partition(_ON_GPU)
            x = _LEFT + _WIDTH * column
            lines.append(
                f'<rect x="{x + 1}" y="{y + 1}" width="{_WIDTH - 2}" height="{_HEIGHT - 2}" rx="4"'
                f' class="{_CLASSES[kind]}"/>'
            )
            word = kind.replace("one copy", "1 copy").replace("two copies", "2 copies")
            star = "*" if on_gpu else ""
            lines.append(f'<text x="{x + _WIDTH // 2}" y="{y + 22}">{word}{star}</text>')
    note = "* on the GPU; CuPy has no host arrays"
    place = f'x="{width - 8}" y="{height - 12}" text-anchor="end"'
    lines.append(f'<text {place} class="note">{note}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def updated(text: str) -> str:
    """Return ``text`` with a new table between the two comments.

    Raises:
        ValueError: If a comment is missing.
    """
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return f"{text[:begin]}\n{markdown()}\n{text[end:]}"


def main() -> int:
    """Rewrite or check the files, and return the exit status."""
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
    if PICTURE.parent.is_dir():
        drawn = PICTURE.read_text(encoding="utf-8") if PICTURE.is_file() else ""
        if check and drawn != picture():
            print(f"{PICTURE.relative_to(CHECKOUT).as_posix()} is out of date; run without --check.")
            stale = 1
        elif not check:
            PICTURE.write_text(picture(), encoding="utf-8")
    if check and not stale:
        print("README.md is current.")
    return stale


if __name__ == "__main__":
    sys.exit(main())
