"""What the documentation says is so: its links, its tables, its error messages. (`tox -e docs` builds it.)"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import convert_memory
from tests.helpers import require, run_python

CHECKOUT = Path(__file__).parent.parent
DOCS = CHECKOUT / "docs"

if not DOCS.is_dir():
    pytest.skip("there are no docs beside these tests", allow_module_level=True)


def test_the_table_of_pairs_on_its_page_is_that_of_the_readme() -> None:
    pages = [CHECKOUT / "README.md", DOCS / "conversion-table.md"]
    tables = [re.findall(r"^\| (?:from|\*\*).*$", page.read_text("utf-8"), re.MULTILINE) for page in pages]
    assert len(tables[0]) == 7
    assert tables[0] == tables[1]


def test_the_index_for_tools_has_every_page_by_its_title() -> None:
    index = (DOCS / "llms.txt").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^- \[.*?\]\((.*?)\.html\): (\S.*)$", index, flags=re.MULTILINE))
    pages = {page.stem: page.read_text("utf-8") for page in DOCS.glob("*.md") if page.stem != "index"}
    assert set(listed) == {*pages, "changelog", "gallery/index"}
    for stem, text in pages.items():
        title = text.partition("\n")[0].removeprefix("# ").replace("`", "")
        assert f"[{title}]({stem}.html)" in index


def test_the_cheat_sheet_is_current_and_its_calls_are_those_of_the_library() -> None:
    done = run_python(str(CHECKOUT / "tools" / "cheat_sheet.py"), "--check")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    text = (DOCS / "cheat-sheet.md").read_text(encoding="utf-8")
    library, _, commands = text.partition("## Command line")
    calls = re.findall(r"^\| (`.*?) \| ", library, flags=re.MULTILINE)
    names = re.findall(r"`(?:@|with )?([a-z_]+)", " ".join(calls), flags=re.IGNORECASE)
    assert len(names) > 40
    assert [name for name in names if name != "dask" and not hasattr(arraybridge, name)] == []
    for command in re.findall(r"`arraybridge (\w+)", commands):
        assert (Path(arraybridge.__file__).parent / "cli" / f"{command}.py").is_file()


# -- the messages that the page on troubleshooting explains -----------------------------------------------


X = np.zeros((2, 3))


def _traced() -> Any:
    return require("jax").jit(lambda x: convert_memory(x, "numpy"))(np.ones(2, np.float32))


def _read_only() -> None:
    require("jax")
    arraybridge.to_numpy(arraybridge.to_jax(X))[0] = 1


def _resized() -> None:
    memory = np.arange(16.0)
    tensor = arraybridge.to_torch(memory)
    try:
        memory.resize(4)
    finally:
        del tensor


CASES: dict[str, Callable[[], Any]] = {
    "NumPy arrays live on the host": lambda: arraybridge.to_gpu(X),
    "an object of type list is no array": lambda: convert_memory([1], "numpy"),
    "pyclesperanto has no dtype float64": lambda: convert_memory(X, "pyclesperanto"),
    "dtype object": lambda: convert_memory(np.array([None]), "torch"),
    "a masked array of numpy": lambda: convert_memory(np.ma.masked_equal(X, 0), "torch"),
    "a sparse_coo tensor": lambda: convert_memory(require("torch").ones(2).to_sparse(), "numpy"),
    "a traced value of jax": _traced,
    "pyclesperanto cannot hold an array of shape": lambda: convert_memory(
        np.zeros((1, 1, 1, 1), np.float32), "pyclesperanto"
    ),
    "requires grad": lambda: convert_memory(require("torch").ones(2, requires_grad=True), "numpy"),
    "copy=False": lambda: convert_memory(X[::-1], "torch", copy=False),
    "declared as torch": lambda: convert_memory(X, "torch", "numpy"),
    "'pytorch' is no framework": lambda: convert_memory(X, "pytorch"),
    "gpu_id=-1": lambda: convert_memory(X, "torch", -1),
    "'cuda0' is not a device": lambda: convert_memory(X, "torch", device="cuda0"),
    "not both": lambda: convert_memory(X, "torch", gpu_id=0, device="cpu"),
    "is a decorator and has no 'nn'": lambda: arraybridge.torch.nn,  # type: ignore[attr-defined]
    "no namespace in common": lambda: arraybridge.array_namespace(X, arraybridge.to_torch(X)),
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
    message = " ".join(f"{type(caught.value).__name__}: {caught.value}".split())
    wanted = ".*".join(re.escape(part.strip()) for part in heading.split("…"))
    assert re.match(wanted, message), f"{message!r} is not explained by {heading!r}"
