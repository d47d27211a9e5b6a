"""What the documentation says is so: its links, its tables, its error messages. (`tox -e docs` builds it.)"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import convert_memory
from tests.helpers import require

CHECKOUT = Path(__file__).parent.parent
DOCS = CHECKOUT / "docs"

if not DOCS.is_dir():
    pytest.skip("there are no docs beside these tests", allow_module_level=True)


def check_links(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(DOCS / "check_links.py"), str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_link_check_finds_what_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "other.html").write_text('<h1 id="here">x</h1>', encoding="utf-8")
    (tmp_path / "index.html").write_text(
        '<a href="other.html#here">right</a><a href="https://example.org/">elsewhere</a>', encoding="utf-8"
    )
    assert check_links(tmp_path).returncode == 0
    (tmp_path / "index.html").write_text(
        '<a href="gone.html">a</a><a href="other.html#gone">b</a><img src="https://example.org/c.png">',
        encoding="utf-8",
    )
    done = check_links(tmp_path)
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "index.html loads https://example.org/c.png from the network",
        "index.html points to gone.html, which is not there",
        "index.html points to other.html#gone, which has no such anchor",
    ]


def test_the_link_check_minds_which_signature_the_reference_shows(tmp_path: Path) -> None:
    shown = """<dt class="sig" id="arraybridge.convert_memory"><span>convert_memory</span>(<em>data</em>,
        <em>{}</em>, <em>gpu_id=None</em>)<a href="#arraybridge.convert_memory">¶</a></dt>"""
    (tmp_path / "api.html").write_text(shown.format("target"), encoding="utf-8")
    assert check_links(tmp_path).returncode == 0
    (tmp_path / "api.html").write_text(shown.format("source_type=None"), encoding="utf-8")
    done = check_links(tmp_path)
    assert done.returncode == 1
    assert "shows arraybridge.convert_memory(data, source_type=None" in done.stdout


def test_the_table_of_pairs_on_its_page_is_that_of_the_readme() -> None:
    pages = [
        (path.read_text(encoding="utf-8")) for path in (CHECKOUT / "README.md", DOCS / "conversion-table.md")
    ]
    tables = [re.findall(r"^\| (?:from|\*\*).*$", text, flags=re.MULTILINE) for text in pages]
    assert len(tables[0]) == 7
    assert tables[0] == tables[1]


def test_the_index_for_tools_has_every_page_by_its_title() -> None:
    index = (DOCS / "llms.txt").read_text(encoding="utf-8")
    there = dict(re.findall(r"^- \[.*?\]\((.*?)\.html\): (\S.*)$", index, flags=re.MULTILINE))
    pages = {
        page.stem: page.read_text(encoding="utf-8") for page in DOCS.glob("*.md") if page.stem != "index"
    }
    assert set(there) == {*pages, "changelog", "gallery/index"}
    for stem, text in pages.items():
        title = text.partition("\n")[0].removeprefix("# ").replace("`", "")
        assert f"[{title}]({stem}.html)" in index


# -- the cheat sheet ---------------------------------------------------------------------------------------


def test_the_picture_of_the_cheat_sheet_is_current() -> None:
    command = [sys.executable, str(CHECKOUT / "tools" / "cheat_sheet.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == ""


def test_every_call_on_the_cheat_sheet_is_one_of_the_library() -> None:
    text = (DOCS / "cheat-sheet.md").read_text(encoding="utf-8")
    library, _, commands = text.partition("## Command line")
    calls = re.findall(r"^\| (`.*?) \| ", library, flags=re.MULTILINE)
    names = re.findall(r"`(?:@|with )?([a-z_]+)", " ".join(calls), flags=re.IGNORECASE)
    assert len(names) > 40
    assert [name for name in names if name != "dask" and not hasattr(arraybridge, name)] == []
    for command in re.findall(r"`arraybridge (\w+)", commands):
        assert (Path(arraybridge.__file__).parent / "cli" / f"{command}.py").is_file()


# -- the messages that the page on troubleshooting explains -----------------------------------------------


def _array() -> np.ndarray[Any, Any]:
    return np.zeros((2, 3))


def _requires_grad() -> Any:
    return convert_memory(require("torch").ones(2, requires_grad=True), "numpy")


def _sparse() -> Any:
    return convert_memory(require("torch").ones(2).to_sparse(), "numpy")


def _traced() -> Any:
    jax = require("jax")
    return jax.jit(lambda x: convert_memory(x, "numpy"))(np.ones(2, np.float32))


def _two_frameworks() -> Any:
    return arraybridge.array_namespace(_array(), arraybridge.to_torch(_array()))


def _read_only() -> None:
    require("jax")
    arraybridge.to_numpy(arraybridge.to_jax(_array()))[0] = 1


def _resized() -> None:
    require("torch")
    memory = np.arange(16.0)
    tensor = arraybridge.to_torch(memory)
    try:
        memory.resize(4)
    finally:
        del tensor


CASES: dict[str, Callable[[], Any]] = {
    "NumPy arrays live on the host": lambda: arraybridge.to_gpu(_array()),
    "an object of type list is no array": lambda: convert_memory([1], "numpy"),
    "pyclesperanto has no dtype float64": lambda: convert_memory(_array(), "pyclesperanto"),
    "dtype object": lambda: convert_memory(np.array([None]), "torch"),
    "a masked array of numpy": lambda: convert_memory(np.ma.masked_equal(_array(), 0), "torch"),
    "a sparse_coo tensor": _sparse,
    "a traced value of jax": _traced,
    "pyclesperanto cannot hold an array of shape": lambda: convert_memory(
        np.zeros((1, 1, 1, 1), np.float32), "pyclesperanto"
    ),
    "requires grad": _requires_grad,
    "copy=False": lambda: convert_memory(_array()[::-1], "torch", copy=False),
    "declared as torch": lambda: convert_memory(_array(), "torch", "numpy"),
    "'pytorch' is no framework": lambda: convert_memory(_array(), "pytorch"),
    "gpu_id=-1": lambda: convert_memory(_array(), "torch", -1),
    "'cuda0' is not a device": lambda: convert_memory(_array(), "torch", device="cuda0"),
    "not both": lambda: convert_memory(_array(), "torch", gpu_id=0, device="cpu"),
    "is a decorator and has no 'nn'": lambda: arraybridge.torch.nn,  # type: ignore[attr-defined]
    "no namespace in common": _two_frameworks,
    "assignment destination is read-only": _read_only,
    "cannot resize an array": _resized,
}


@pytest.mark.parametrize("words", CASES)
def test_the_page_on_troubleshooting_has_the_message_as_it_comes(words: str) -> None:
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    headings = re.findall(r"^### `(\w+(?:Error|Warning): .*)`$", text, flags=re.MULTILINE)
    (heading,) = [line for line in headings if words in line]
    for framework in ("torch", "pyclesperanto"):
        require(framework)
    with pytest.raises(Exception) as caught:  # noqa: PT011  # which one is what the heading says
        CASES[words]()
    came = " ".join(f"{type(caught.value).__name__}: {caught.value}".split())
    wanted = ".*".join(re.escape(part.strip()) for part in heading.split("…"))
    assert re.match(wanted, came), f"{came!r} is not explained by {heading!r}"
