"""Checks of numbers that callers pass."""

from __future__ import annotations

from typing import Any

import pytest

from arraybridge.validation import whole_number


def test_a_whole_number_is_returned() -> None:
    assert whole_number("axis", -1) == -1
    assert whole_number("depth", 1, least=1) == 1


@pytest.mark.parametrize("value", [True, 1.0, "1", None])
def test_other_types_raise_an_error_that_names_option_and_value(value: Any) -> None:
    with pytest.raises(TypeError) as caught:
        whole_number("depth", value, least=1)
    assert str(caught.value) == f"depth={value!r} must be an int, at least 1."
    with pytest.raises(ValueError, match="depth="):
        whole_number("depth", value, type_error=ValueError)


def test_smaller_numbers_raise_an_error_that_names_option_and_value() -> None:
    with pytest.raises(ValueError, match=r"^depth=0 must be at least 1\.$"):
        whole_number("depth", 0, least=1)
