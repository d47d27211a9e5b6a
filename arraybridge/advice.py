"""Advice in error messages: sentences with expressions, and casts that make a conversion possible."""

from __future__ import annotations

from typing import NamedTuple

from arraybridge.formatting import one_of


class Advice(NamedTuple):  # a dataclass would account for 2 % of the package's import time
    """A sentence that states what to do instead, with the expressions that it contains.

    Attributes:
        text: The sentence, with ``{}`` in the place of each expression.
        expressions: Python expressions, with ``{x}`` in the place of the rejected object. Each evaluates to
            an object that can be converted. Other braces are doubled; see `literal`.
        subject: An expression for the rejected object, with ``{x}`` in the place of the object that the user
            passed.
        name: The name of that object in the sentence. The code always calls it ``x``.

    >>> advice = Advice("Pass {} or {}.", ("{x}.filled(0)", "{x}.data"))
    >>> print(advice)
    Pass x.filled(0) or x.data.
    >>> print(advice.about("image.pixels"))
    Pass image.pixels.filled(0) or image.pixels.data.
    """

    text: str
    expressions: tuple[str, ...] = ()
    subject: str = "{x}"
    name: str = "x"

    def __str__(self) -> str:
        return self.text.format(*self._code_with(self.name)) if self.expressions else self.text

    def code(self) -> tuple[str, ...]:
        """Return the expressions as Python code in which ``x`` is the object that the user passed."""
        return self._code_with("x")

    def templates(self) -> tuple[str, ...]:
        """Return the expressions with ``{x}`` in the place of the object that the user passed."""
        return tuple(one.replace("{x}", self.subject) for one in self.expressions)

    def _code_with(self, name: str) -> tuple[str, ...]:
        subject = self.subject.format(x=name)
        return tuple(one.format(x=subject) for one in self.expressions)

    def about(self, subject: str) -> Advice:
        """Return the same advice about another object, such as ``{x}.data`` instead of ``{x}``."""
        return self._replace(subject=self.subject.format(x=subject))

    def apply(self, code: str, note: str = "", part: str = "") -> Advice:
        """Return the advice to pass the value of ``code``, in which ``{x}`` is each of the expressions.

        Expressions that do not contain ``part`` do not change.

        >>> print(Advice("Pass {}.", ("{x}.data",)).apply("np.asarray({x})"))
        Pass np.asarray(x.data).
        """
        expressions = tuple(code.replace("{x}", one) if part in one else one for one in self.expressions)
        return self._replace(text=self.text + note, expressions=expressions)

    def about_result(self) -> Advice:
        """Return the advice reworded for a function's result, which the function itself must change.

        >>> print(Advice("It is sparse. Pass {}.", ("{x}.to_dense()",)).about_result())
        It is sparse. Pass result.to_dense(). Return that from the function instead.
        """
        if not self.expressions:
            return self
        text = f"{self.text.removesuffix('.')}. Return that from the function instead."
        return self._replace(text=text, name="result")


def literal(text: str) -> str:
    """Return text, such as the name of a column, with its braces escaped for an expression of an `Advice`.

    >>> Advice("Pass {}.", ("{x}[" + literal(repr("{a}")) + "]",)).code()
    ("x['{a}']",)
    """
    return text.replace("{", "{{").replace("}", "}}")


class Cast(NamedTuple):
    """A cast that makes a conversion possible, and the advice to request it.

    Attributes:
        dtype: The suggested dtype: the closest supported one.
        others: Other supported dtypes of the same kind.
        keeps_values: Whether ``dtype`` holds every value of the array.
    """

    dtype: str
    others: tuple[str, ...] = ()
    keeps_values: bool = False

    @property
    def _others(self) -> str:
        return f" (or {one_of(self.others)})" if self.others else ""

    @property
    def _loss(self) -> str:
        return ", which keeps every value" if self.keeps_values else ""

    def by_option(self) -> Advice:
        """Return the advice to pass ``dtype=`` to the conversion."""
        return Advice(f'Pass dtype="{self.dtype}"{self._others} to ask for a cast{self._loss}.')

    def by_decorator(self, name: str) -> Advice:
        """Return the advice to pass ``dtype=`` to the decorator ``name``, for an argument of its function."""
        option = f'@{name}(dtype="{self.dtype}")'
        return Advice(f"Pass dtype= to the decorator to ask for a cast: {option}{self._others}{self._loss}.")

    def in_function(self) -> Advice:
        """Return the advice to cast the result inside the decorated function."""
        return Advice(f'Cast it to "{self.dtype}"{self._others} in the function{self._loss}.')
