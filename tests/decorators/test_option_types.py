"""`DecoratorKeywords` for editors and `DecoratorOptions` for the code declare the same options."""

from __future__ import annotations

import dataclasses
import inspect
import re
from enum import Enum
from typing import Any

import pytest

from arraybridge.decorators.dtype_conversion import DtypeConversion
from arraybridge.decorators.framework_decorators import FrameworkDecorator
from arraybridge.decorators.options import _CHECKS, DecoratorKeywords, DecoratorOptions, check_keywords

FIELDS = {field.name: field for field in dataclasses.fields(DecoratorOptions)}
# Options whose checks narrow the type that callers pass.
NARROWED = {
    "device": "Device | None",
    "input_type": "str | None",
    "dtype": "str | None",
    "dtype_conversion": "DtypeConversion",
}


def documented_defaults() -> dict[str, str]:
    """Return the default that the comment above each keyword states, as code."""
    source = inspect.getsource(DecoratorKeywords)
    entries = re.findall(r"((?:    #:.*\n)+)    (\w+): ", source)
    defaults = {}
    for comment, name in entries:
        text = re.sub(r"\s*#: ?", " ", comment)
        (defaults[name],) = re.findall(r"Defaults to ``(.+?)``", text)
    return defaults


def as_code(value: Any) -> str:
    if isinstance(value, Enum):
        return str(value)
    return repr(value).replace("'", '"')


def test_each_keyword_is_a_field_of_the_same_type() -> None:
    keywords = {name: hint.__forward_arg__ for name, hint in DecoratorKeywords.__annotations__.items()}
    assert set(FIELDS) - set(keywords) == {"framework", "output_type", "converts"}
    assert set(_CHECKS) == {"output_type", *keywords}
    for name, hint in keywords.items():
        assert FIELDS[name].type == NARROWED.get(name, hint), name


def test_each_keyword_documents_the_default_of_its_field() -> None:
    defaults = documented_defaults()
    assert list(defaults) == list(DecoratorKeywords.__annotations__)
    for name, default in defaults.items():
        assert as_code(FIELDS[name].default) == default, name


def test_the_docstring_of_decorators_names_each_keyword() -> None:
    options = (
        (inspect.getdoc(FrameworkDecorator.__call__) or "").partition("**options: ")[2].partition(".")[0]
    )
    assert re.findall(r"``(\w+)``", options) == list(DecoratorKeywords.__annotations__)


def test_options_without_keywords_have_the_defaults() -> None:
    assert check_keywords("torch", {}) == DecoratorOptions(framework="torch", output_type="torch")
    options = check_keywords("torch", {"dtype_conversion": "uint8", "input_type": "numpy", "strict": True})
    assert options.dtype_conversion is DtypeConversion.UINT8
    assert options.required_source == "numpy"
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.strict = False  # type: ignore[misc]
