"""Every example in a docstring runs, module by module."""

from __future__ import annotations

import doctest
import importlib
import os
from pathlib import Path
from unittest import mock

import pytest

import arraybridge
from tests.helpers import registry_kept, require

PACKAGE = Path(arraybridge.__file__).parent
MODULES = [
    ".".join(("arraybridge", *file.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
    for file in sorted(PACKAGE.rglob("*.py"))
    if ">>> " in file.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_run(name: str) -> None:
    for framework in ("torch", "jax"):  # which most examples show
        require(framework)
    if name.rpartition(".")[2] in ("mlx", "paddle"):
        require(name.rpartition(".")[2])
    if "dask" in name:
        pytest.importorskip("distributed")
    module = importlib.import_module(name)
    with mock.patch.dict(os.environ), registry_kept():
        found = doctest.testmod(module, report=False, raise_on_error=False)
    assert found.attempted > 0
    assert found.failed == 0, "see what was printed"
