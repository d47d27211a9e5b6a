"""Mistakes to plant are mistakes in the code as it is; whether tests notice is asked by hand (README.md)."""

from __future__ import annotations

import ast

import pytest

from tests.card import plant

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("mistake", plant.MISTAKES, ids=lambda mistake: mistake.file)
def test_a_mistake_can_be_planted(mistake: plant.Mistake) -> None:
    ast.parse(plant.planted(mistake, plant.ROOT / "arraybridge"))
    assert all((plant.ROOT / test).exists() for test in mistake.tests)
