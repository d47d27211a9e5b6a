"""Steps from an object to an array of numbers, from which the expressions in advice are made.

A library has a function that yields the steps that may help for an object, with the preferred one first. The
advice is the first sequence of steps whose result can be converted. Each step contains its result, so its
expression is known to run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from arraybridge.advice import Advice, literal
from arraybridge.errors import ArrayNotSupportedError, DtypeNotSupportedError, MemoryConversionError
from arraybridge.outcome import ask

__all__ = ["NO_NUMBERS", "Check", "Step", "StepsOf", "advice_by_steps", "columns", "items", "step"]

NO_NUMBERS = Advice("It holds no array of numbers. Pass an object that does.")
#: The maximum number of steps, for example through nested lists.
_MOST_STEPS = 16
#: A function that raises an error if an object cannot be converted.
Check = Callable[[Any], None]
#: A function that yields the steps for an object.
StepsOf = Callable[[Any], Iterable["Step"]]


class Step(NamedTuple):
    """An operation whose result is an array of numbers, or closer to one than the object.

    Attributes:
        text: A sentence with ``{}`` in place of the expression; ``""`` for that of the next step.
        code: The expression for the result, in which ``{x}`` is the object.
        value: The result, or a smaller object of the same kind; None if the operation failed.
        indirect: The sentence to use if further steps are necessary. Defaults to None, which uses ``text``.
    """

    text: str
    code: str
    value: Any
    indirect: str | None = None


def step(x: Any, text: str, path: str, *args: Any, **kwargs: Any) -> Step:
    """Return the step that reads a path of attributes and calls, such as ``"chunk().data"``.

    If there are arguments, the last name of the path is a method that is called with them.
    """
    arguments = [*map(_text, args), *(f"{name}={_text(value)}" for name, value in kwargs.items())]
    code = f"{{x}}.{path}" + (f"({literal(', '.join(arguments))})" if arguments else "")

    def follow(value: Any) -> Any:
        for name in path.split("."):
            value = getattr(value, name.removesuffix("()"))
            value = value() if name.endswith("()") else value
        return value(*args, **kwargs) if arguments else value

    return Step(text, code, ask(follow, x))


def _text(argument: Any) -> str:
    if isinstance(argument, float):
        return "np.nan"
    return f'"{argument}"' if isinstance(argument, str) else getattr(argument, "__name__", str(argument))


def items(what: str, pairs: Iterable[tuple[Any, Any]]) -> Iterator[Step]:
    """Yield the steps that read an item; ``pairs`` has the names and the items, or objects like the items."""
    for name, value in pairs:
        yield Step(
            f"It holds several arrays. Pass one of its {what}, {{}}.",
            f"{{x}}[{literal(repr(name))}]",
            value,
            f"None of its {what} converts as it is. Pass one as numbers, {{}}.",
        )


def columns(
    names: Iterable[Any], are_numbers: Sequence[bool], place: str, read: Callable[[int], Any]
) -> Iterator[Step]:
    """Yield the steps that read one column of a table, those of numbers first.

    Args:
        names: The names of the columns.
        are_numbers: Whether each column holds numbers.
        place: The expression for a column whose name is not unique or cannot be written, with ``{i}``.
        read: Returns a column by its place.
    """
    names = list(names)
    counts = Counter(map(repr, names))
    for i in np.argsort(np.logical_not(are_numbers), kind="stable").tolist():
        (one,) = items("columns", [(names[i], read(i))])
        parts = names[i] if type(names[i]) is tuple else (names[i],)
        is_plain = counts[repr(names[i])] == 1 and all(type(part) in (str, int) for part in parts)
        yield one if is_plain else one._replace(code=place.replace("{i}", str(i)))


def advice_by_steps(x: Any, steps_of: StepsOf, check: Check) -> Advice:
    """Return the advice for an object.

    Args:
        x: The object.
        steps_of: A function that yields the steps for the object, and for the result of a step.
        check: A function that raises the error for an object that cannot be converted.
    """
    path = _find_path(x, steps_of, check, _MOST_STEPS)
    if not path:
        return NO_NUMBERS
    text = path[0].text if path[0].indirect is None or len(path) == 1 else path[0].indirect
    code = "{x}"
    for one in path:
        text = text or one.text
        code = one.code.replace("{x}", code)
    return Advice(text or "Pass {}.", (code,))


def _find_path(x: Any, steps_of: StepsOf, check: Check, most: int) -> list[Step] | None:
    """Return the steps to an object that can be converted; None if there are none. One step is preferred."""
    indirect = []
    for one in _until_failure(steps_of(x)) if most else ():
        if one.value is not None:
            advised = _rest_of_path(one.value, check)
            if advised == []:
                return [one]
            indirect.append((one, advised))
    for one, advised in indirect:
        following = advised or _find_path(one.value, steps_of, check, most - 1)
        if following is not None:
            return [one, *following]
    return None


def _until_failure(steps: Iterable[Step]) -> Iterator[Step]:
    """Yield steps until the object raises, such as a closed file."""
    try:
        yield from steps
    except Exception:  # noqa: BLE001  # third-party objects may raise anything
        return


def _rest_of_path(x: Any, check: Check) -> list[Step] | None:
    """Return ``[]`` for an object that can be converted, the step that its error advises, or else None."""
    try:
        check(x)
    except (DtypeNotSupportedError, ArrayNotSupportedError) as error:
        # The errors of carriers advise to replace nulls, which is for the user to decide.
        is_carrier = not isinstance(x, np.ndarray) and isinstance(error, ArrayNotSupportedError)
        code = None if is_carrier and not error.target_type else _code_of(error, x)
        return None if code is None else [Step("", code, None)]
    except Exception:  # noqa: BLE001  # third-party objects may raise anything
        return None
    return []


def _code_of(error: MemoryConversionError, x: Any) -> str | None:
    """Return the code that an error advises for an array, or None."""
    if error.templates:
        return error.templates[0]
    if error.cast is None:
        return None
    dtype = error.cast.dtype
    if isinstance(x, np.ndarray):
        return f'np.asarray({{x}}, "{dtype}")'
    return f'arraybridge.to_numpy({{x}}, dtype="{dtype}")'
