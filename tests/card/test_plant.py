"""Mistakes to plant are mistakes in the code as it is; whether tests notice is asked by hand (README.md)."""

from __future__ import annotations

import ast

import pytest

from tests.card import plant
from tests.card.mistakes import MISTAKES, Mistake

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.file)
def test_a_mistake_can_be_planted(mistake: Mistake) -> None:
    text = plant.planted(mistake, plant.ROOT / "arraybridge")
    if mistake.file.endswith(".py"):
        ast.parse(text)
    for test in mistake.tests:
        path, _, name = test.partition("::")
        assert (plant.ROOT / path).exists()
        assert f"def {name}(" in (plant.ROOT / path).read_text(encoding="utf-8") if name else True
