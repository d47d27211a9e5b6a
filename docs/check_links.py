#!/usr/bin/env python3
"""Check the links of the built documentation, and that it loads nothing from the network.

    python docs/check_links.py docs/_build

Links must lead to existing pages, anchors and files. Images, scripts and styles must be part of the build.
The reference must show the most common call signature of each function. Prints one line per fault, and exits
with 1 if there are any.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

#: Pages that Sphinx writes for itself; under _modules/ the source of each module.
GENERATED = {"genindex.html", "search.html"}
#: The first parameters of functions that take their arguments in several forms.
FORMS = {
    "arraybridge.convert_memory": ["data", "target", "gpu_id"],
    "arraybridge.explain": ["data", "target", "gpu_id"],
}


class Page(HTMLParser):
    """The anchors of a page, what it links to, and what it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        #: Name → text of its signature on the page.
        self.signatures: dict[str, str] = {}
        self._open = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value}
        if "id" in values:
            self.anchors.add(values["id"])
        if tag == "dt":
            self._open = values.get("id", "")
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag == "link" and values.get("rel") in ("stylesheet", "icon", "preload") and "href" in values:
            self.loads.append(values["href"])
        if tag in ("img", "script", "iframe") and "src" in values:
            self.loads.append(values["src"])

    def handle_data(self, data: str) -> None:
        if self._open:
            self.signatures[self._open] = self.signatures.get(self._open, "") + data

    def handle_endtag(self, tag: str) -> None:
        if tag == "dt":
            self._open = ""


def first_form(page: Page) -> list[str]:
    """Return a fault for each signature of a page that does not begin with the most common parameters."""
    wrong = []
    for name, form in FORMS.items():
        shown = " ".join(page.signatures.get(name, "").split())
        parameters = [
            part.partition("=")[0].partition(":")[0] for part in shown.partition("(")[2].split(", ")
        ]
        if shown and [one.strip() for one in parameters[: len(form)]] != form:
            wrong.append(
                f"shows {name}{shown[shown.index('(') :]}, which should begin with {', '.join(form)}"
            )
    return wrong


def faults(folder: Path) -> list[str]:
    """Return the faults of all pages in a folder, one line each."""
    pages = {path.resolve(): Page(path) for path in sorted(folder.rglob("*.html"))}
    if not pages:
        return [f"{folder} has no pages"]
    wrong = []
    for path, page in pages.items():
        name = path.relative_to(folder.resolve())
        if path.name in GENERATED or name.parts[0] == "_modules":
            continue
        wrong += [f"{name} loads {url} from the network" for url in page.loads if urlsplit(url).netloc]
        wrong += [f"{name} {fault}" for fault in first_form(page)]
        for url in page.links + page.loads:
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists():
                wrong.append(f"{name} points to {url}, which does not exist")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                wrong.append(f"{name} points to {url}, an anchor that does not exist")
    return wrong


def main() -> int:
    """Print the faults; returns the exit status."""
    found = faults(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/_build"))
    print("\n".join(found) or "All links lead somewhere.")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
