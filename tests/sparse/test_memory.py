"""Memory of sparse conversions: a million entries in 200,000 × 200,000, between all frameworks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.helpers import require, run_python
from tests.sparse.arrays import LAYOUTS, PAIRS

LIMIT = 200_000_000


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("source", LAYOUTS)
def test_a_large_matrix_is_converted_below_200_megabytes(source: str) -> None:
    for name in LAYOUTS:
        require(name)
    script = str(Path(__file__).with_name("travels.py"))
    done = run_python(script, source, imported=True)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    expected = [(target, layout) for one, target, layout in PAIRS if one == source]
    assert [(target, layout) for target, layout, _ in lines] == expected
    assert [line for line in lines if int(line[2]) >= LIMIT] == []
