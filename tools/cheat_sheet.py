"""Draw docs/cheat-sheet.md as an image, docs/_static/cheat-sheet.svg.

python tools/cheat_sheet.py           draws it
python tools/cheat_sheet.py --check   changes nothing, and exits with 1 if the image is out of date
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.sax.saxutils import escape

DOCS = Path(__file__).parent.parent / "docs"
PAGE = DOCS / "cheat-sheet.md"
IMAGE = DOCS / "_static" / "cheat-sheet.svg"

_WIDTH, _LINE, _GAP, _TOP = 750, 21, 20, 64
_FONT = 'font-family="Helvetica, Arial, sans-serif" font-size="14"'
_TITLE = 'font-size="16" font-weight="bold" fill="#1d6f66"'
_MONO = 'font-family="monospace" font-size="13"'
# The width of the code in a column.
_CODE = 375


def sections(text: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the titles of the page, each with its rows of call and result."""
    found = []
    for part in text.split("\n## ")[1:]:
        rows = re.findall(r"^\| (`.*) \| (.*) \|$", part, flags=re.MULTILINE)
        found.append((part.partition("\n")[0], [(_plain(call), _plain(result)) for call, result in rows]))
    return found


def _plain(cell: str) -> str:
    return cell.replace("`", "")


def image(text: str) -> str:
    """Return the page as an SVG in two columns, in the proportions of a landscape sheet."""
    parts = sections(text)
    heights = [_LINE * (len(rows) + 1) + _GAP for _, rows in parts]
    columns: list[list[int]] = [[], []]
    for i in range(len(parts)):
        columns[sum(heights[:i]) >= sum(heights) / 2].append(i)
    height = _TOP + max(sum(heights[i] for i in column) for column in columns)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * _WIDTH} {height}" role="img" {_FONT}>',
        "<title>arraybridge on one page</title>",
        f'<rect width="{2 * _WIDTH}" height="{height}" fill="#ffffff"/>',
        '<text x="24" y="40" font-size="24" font-weight="bold">arraybridge on one page</text>',
        '<text x="330" y="40">after import arraybridge as ab</text>',
    ]
    for number, column in enumerate(columns):
        x, y = 24 + _WIDTH * number, _TOP
        for i in column:
            title, rows = parts[i]
            lines.append(f'<text x="{x}" y="{y + 16}" {_TITLE}>{escape(title)}</text>')
            for row, (call, result) in enumerate(rows, 1):
                baseline = y + 16 + _LINE * row
                lines.append(f'<text x="{x}" y="{baseline}" {_MONO}>{escape(call)}</text>')
                lines.append(f'<text x="{x + _CODE}" y="{baseline}">{escape(result)}</text>')
            y += heights[i]
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> int:
    """Draw or check the image; return the exit status."""
    drawn = image(PAGE.read_text(encoding="utf-8"))
    if "--check" not in sys.argv[1:]:
        IMAGE.write_text(drawn, encoding="utf-8")
    elif not IMAGE.is_file() or IMAGE.read_text(encoding="utf-8") != drawn:
        print("docs/_static/cheat-sheet.svg is out of date; run python tools/cheat_sheet.py.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
