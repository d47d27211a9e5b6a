"""The README keeps its word: the table is current, and its examples run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

from tests.helpers import require, run_python, tool

CHECKOUT = Path(__file__).parent.parent
README = (CHECKOUT / "README.md").read_text(encoding="utf-8")
TABLE = tool("conversion_table")
EXAMPLE = re.compile(r"^```python\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


def test_the_table_of_pairs_is_current() -> None:
    assert TABLE.updated(README) == README, "run python tools/conversion_table.py"


# After those whose output is compared, and without theirs: each with names of its own alone.
THE_OTHERS = """
import contextlib, io, runpy, sys
for script in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()):
        runpy.run_path(script, run_name="__main__")
"""


def test_the_examples_run_as_they_stand_and_print_what_they_say(tmp_path: Path) -> None:
    """Those of the README, and the first of the documentation's front page, in one process."""
    for name in ("torch", "jax", "tensorflow"):
        require(name)
    checks = (
        "assert tensor.data_ptr() == image.__array_interface__['data'][0]",
        "assert array.dtype == 'float64'",
        "assert array.unsafe_buffer_pointer() == tensor.data_ptr()",
        "del image, tensor, array",
    )
    code, said = "", ""
    for page in filter(Path.is_file, (CHECKOUT / "README.md", CHECKOUT / "docs" / "index.md")):
        front = page.read_text(encoding="utf-8")
        block = re.search(EXAMPLE.pattern + r"\n\n```text\n(.*?)^```$", front, flags=EXAMPLE.flags)
        assert block is not None
        code += "\n".join([block[1], *checks, ""])
        said += block[2]
    examples = [code + THE_OTHERS, *EXAMPLE.findall(README)[1:]]
    assert len(examples) >= 4
    scripts = [tmp_path / f"example_{number}.py" for number in range(len(examples))]
    for script, example in zip(scripts, examples, strict=True):
        script.write_text(example, encoding="utf-8")
    # As a reader runs it, whom nobody has told how to silence TensorFlow.
    done = run_python(*map(str, scripts), env={"TF_CPP_MIN_LOG_LEVEL": ""})
    assert (done.returncode, done.stdout) == (0, said), done.stderr
    # What TensorFlow itself says of some processors when it is imported.
    of_tensorflow = r"^(WARNING: All log messages before|I\d{4} .*\.cc:\d+\] |To enable the following).*\n"
    assert re.sub(of_tensorflow, "", done.stderr, flags=re.MULTILINE) == ""
