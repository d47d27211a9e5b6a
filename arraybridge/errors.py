"""Errors and warnings of the package.

Each message states the problem, the cause and the fix. Each class also derives from the built-in exception
that a NumPy user would expect, so that existing handlers keep working.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from arraybridge.advice import Advice, Cast
from arraybridge.hooks import hooks
from arraybridge.outcome import ask
from arraybridge.reasons import Reason


def nearest(word: str, names: Iterable[str]) -> str:
    """Return a hint such as ``" (did you mean 'torch'?)"``, or an empty string if no name is similar."""
    import difflib  # takes 5 ms, and only errors need it

    close = difflib.get_close_matches(word.lower(), list(names), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def text_of(error: BaseException) -> str | None:
    """Return the message of an error, or None if its ``__str__`` raises."""
    return ask(str, error)


def note_on(error: BaseException, note: str) -> None:
    """Add a note to a third-party error once, unless its class rejects attributes (frozen dataclasses do)."""
    with suppress(Exception):  # __setattr__ or __notes__ of a third-party class may raise anything
        if note not in getattr(error, "__notes__", ()):
            BaseException.add_note(error, note)


def first_line(text: str) -> str:
    """Return the first line of a message, for a table or a log."""
    return text.partition("\n")[0]


def error_text(error: BaseException) -> str:
    """Return ``"ValueError: its message"``, or only the class name if there is no message."""
    text = text_of(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def text_or_raise(error: BaseException) -> str:
    """Return `error_text` of a third-party error, or raise the error unchanged if its ``__str__`` raises."""
    if text_of(error) is None:
        raise error
    return error_text(error)


# For each file, the registry in which Python records the warnings that it has shown.
_shown: dict[str, dict[Any, int]] = {}


def warn(message: str, category: type[Warning]) -> None:
    """Emit a warning at the line of the user's code that called this package."""
    file, line = hooks.user_line()
    warnings.warn_explicit(message, category, file, line, registry=_shown.setdefault(file, {}))


class MemoryConversionError(Exception):
    """The base class of the errors that this package raises if an array cannot be converted.

    ``str(error)`` consists of ``place``, ``problem`` and ``advice``.

    Attributes:
        source_type: The framework of the array; ``""`` if unknown.
        target_type: The requested framework; ``""`` if unknown.
        method: The attempted route: ``"view"``, ``"dlpack"``, ``"device"``, ``"host"`` or ``""``.
        problem: The message without ``place`` and ``advice``.
        reason: The cause, without the advice.
        code: The cause as a `Reason`, or None.
        advice: A sentence that states what to do instead; ``""`` if there is no advice.
        expressions: The expressions in the advice. Each is Python code in which ``x`` is the object that was
            passed, or the result of the function that ``place`` names. Each evaluates to an object that can
            be converted.
        place: The argument or result that holds the array, such as ``"f(), argument 'x'[0]"``, or the path of
            the array in a container, such as ``"['batch'][0]"``; ``""`` if there is neither.
        cast: A cast with which the conversion succeeds if the target does not support the dtype; otherwise
            None.

    Example:
        >>> import numpy as np, arraybridge
        >>> masked = np.ma.masked_equal([1, 2], 2)
        >>> try:
        ...     arraybridge.to_torch(masked)
        ... except arraybridge.MemoryConversionError as error:
        ...     print(type(error).__name__, error.source_type, error.expressions[0])
        ArrayNotSupportedError numpy x.filled(0)
    """

    #: AutoGraph raises an exception with this attribute unchanged, and replaces others by a StagingError
    #: (tensorflow/python/autograph/impl/api.py, TensorFlow 2.21).
    ag_pass_through = True

    def __init__(
        self,
        problem: str = "",
        *,
        source_type: str = "",
        target_type: str = "",
        method: str = "",
        reason: str = "",
        code: Reason | None = None,
        advice: Advice | str = "",
        cast: Cast | None = None,
        place: str = "",
    ) -> None:
        super().__init__(problem)
        self.problem = problem
        self.source_type = source_type
        self.target_type = target_type
        self.method = method
        self.reason = reason or problem
        self.code = code
        self.cast = cast
        self._advice = Advice(advice) if isinstance(advice, str) else advice
        # The function calls around the array, outermost first, and the path in the container below them.
        self._calls: tuple[str, ...] = (place,) if place else ()
        self._path = ""

    def __str__(self) -> str:
        """Return the message, made from ``place``, ``problem`` and ``advice``."""
        message = _sentences(self.problem, self.advice)
        if not self.place:
            return message
        place = self.place if self._calls else f"at {self.place}"
        return f"{place}: {message or type(self).__name__}"

    @property
    def advice(self) -> str:
        """The advice as text; empty if there is none."""
        return str(self._advice)

    @property
    def expressions(self) -> tuple[str, ...]:
        """The expressions in the advice, as Python code."""
        return self._advice.code()

    @property
    def templates(self) -> tuple[str, ...]:
        """The expressions, with ``{x}`` in the place of the object that was passed."""
        return self._advice.templates()

    @property
    def place(self) -> str:
        """The function, argument or position that the error is about; empty if unknown."""
        return ": ".join(self._calls) + self._path

    def advise(self, advice: Advice) -> None:
        """Replace the advice."""
        self._advice = advice

    def advise_cast(self, cast: Cast | None) -> None:
        """Replace the advice with the advice to request another cast; None removes the advice."""
        self.cast = cast
        self._advice = Advice("") if cast is None else cast.by_option()

    def blame_result(self, function: str) -> None:
        """Add the function whose result was rejected to ``place``, and give advice for that function."""
        self.add_call(f"{function}(), result")
        self._advice = self._advice.about_result() if self.cast is None else self.cast.in_function()

    def advise_about(self, subject: str) -> None:
        """Apply the advice to an expression other than ``{x}``, such as ``{x}.data``; ignore ``""``."""
        if subject:
            self._advice = self._advice.about(subject)

    def advise_then(self, code: str, note: str, part: str = "") -> None:
        """Apply ``code``, in which ``{x}`` is each expression, to those with ``part``, and add a note."""
        if self._advice.expressions:
            self._advice = self._advice.apply(code, note, part)

    def add_path(self, path: str) -> None:
        """Add the path of the array in a container, such as ``['batch'][0]``, to ``place``."""
        if self._calls:
            self._calls = (f"at {path}", *self._calls)
        else:
            self._path = path + self._path

    def add_call(self, call: str) -> None:
        """Add the function call that the array belongs to, such as ``f(), argument 'x'``, to ``place``."""
        self._calls = (call, *self._calls)

    def is_in(self, call: str) -> bool:
        """Return whether ``call`` is the outermost function call in ``place``."""
        return self._calls[:1] == (call,)


def _sentences(problem: str, advice: str) -> str:
    """Return a problem and its advice as text; a problem without a final period is joined with a colon."""
    if not advice:
        return problem
    return f"{problem} {advice}" if problem.endswith(".") else f"{problem}: {advice}"


class FrameworkNotInstalledError(MemoryConversionError, ImportError):
    """The framework is not installed, or its import failed.

    Also an ``ImportError``. The message contains the command that installs it, or the error raised by its
    import.

    Example:
        >>> import numpy as np, arraybridge
        >>> try:
        ...     array = arraybridge.convert(np.ones(2), "mlx")
        ... except arraybridge.FrameworkNotInstalledError as error:
        ...     array = np.ones(2)  # continue without it
    """

    def add_path(self, path: str) -> None:
        """Do nothing, because the framework is missing for every array."""


class DeviceNotFoundError(MemoryConversionError, ValueError):
    """The framework does not have the device; the message lists the available devices.

    Also a ``ValueError``.

    Example:
        >>> import numpy as np, arraybridge
        >>> arraybridge.to_torch(np.ones(2), gpu_id=99)
        Traceback (most recent call last):
            ...
        arraybridge.errors.DeviceNotFoundError: ...
    """


class DtypeNotSupportedError(MemoryConversionError, TypeError, ValueError):
    """The target does not support the dtype of the array; pass ``dtype`` to cast.

    Also a ``TypeError`` and a ``ValueError``. ``error.cast`` is a cast with which the conversion succeeds, or
    None.

    Example:
        >>> import numpy as np, arraybridge
        >>> arraybridge.to_torch(np.array(["a", "b"]))
        Traceback (most recent call last):
            ...
        arraybridge.errors.DtypeNotSupportedError: ...
    """


class ArrayNotSupportedError(MemoryConversionError, TypeError, ValueError):
    """The target cannot represent the array without loss, or ``out`` has another shape, layout or dtype.

    Raised for masked, quantized, ragged, meta and traced arrays, and for more axes than the target supports.
    Also a ``TypeError`` and a ``ValueError``.

    Example:
        >>> import numpy as np, arraybridge
        >>> masked = np.ma.masked_equal([1, 2], 2)
        >>> arraybridge.to_torch(masked)
        Traceback (most recent call last):
            ...
        arraybridge.errors.ArrayNotSupportedError: ...
        >>> arraybridge.to_torch(masked.filled(0))
        tensor([1, 0])
    """


class CannotSplitError(MemoryConversionError, ValueError):
    """The arguments have no batch to split, or the results of the parts cannot be joined.

    Also a ``ValueError``.

    Example:
        >>> import numpy as np, arraybridge
        >>> def mean(batch):
        ...     if len(batch) > 2:
        ...         raise MemoryError
        ...     return float(batch.mean())  # one number per part, which cannot be joined
        >>> arraybridge.split_and_retry(mean, np.ones((4, 3)))
        Traceback (most recent call last):
            ...
        arraybridge.errors.CannotSplitError: ...
    """


class CheckpointError(MemoryConversionError, ValueError):
    """A file is not a complete and consistent checkpoint; the message names the file and the defect.

    Also a ``ValueError``.

    Example:
        >>> import tempfile, arraybridge
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     arraybridge.load_safetensors(file.name)
        Traceback (most recent call last):
            ...
        arraybridge.errors.CheckpointError: ...
    """


class CopyRequiredError(MemoryConversionError, ValueError):
    """The conversion has to copy, but ``copy=False`` was passed; the message states why.

    Also a ``ValueError``.

    Example:
        >>> import numpy as np, arraybridge
        >>> arraybridge.to_torch(np.arange(3)[::-1], copy=False)
        Traceback (most recent call last):
            ...
        arraybridge.errors.CopyRequiredError: ...
    """


class GradientError(MemoryConversionError, RuntimeError):
    """The conversion would lose the gradient of a tensor; pass ``grad="detach"`` to permit that.

    Also a ``RuntimeError``. Functions decorated with ``grad="flow"`` raise it for unsupported cases.

    Example:
        >>> import torch, arraybridge
        >>> weights = torch.ones(2, requires_grad=True)
        >>> arraybridge.to_numpy(weights)
        Traceback (most recent call last):
            ...
        arraybridge.errors.GradientError: ...
        >>> arraybridge.to_numpy(weights, grad="detach")
        array([1., 1.], dtype=float32)
    """


class SourceMismatchError(MemoryConversionError, TypeError, ValueError):
    """The array does not belong to the declared source framework.

    Also a ``TypeError`` and a ``ValueError``.

    Example:
        >>> import numpy as np, arraybridge
        >>> arraybridge.convert_memory(np.ones(2), "torch", "jax")  # source, target
        Traceback (most recent call last):
            ...
        arraybridge.errors.SourceMismatchError: ...
    """


class UnknownArrayError(MemoryConversionError, TypeError, ValueError):
    """The object is not an array of any known framework; the message states what to pass instead.

    Also a ``TypeError`` and a ``ValueError``.

    Example:
        >>> import arraybridge
        >>> arraybridge.to_torch([1, 2])
        Traceback (most recent call last):
            ...
        arraybridge.errors.UnknownArrayError: ...
    """


class UnknownFrameworkError(MemoryConversionError, ValueError):
    """No framework has that name; the message lists the known names and suggests the nearest one.

    Also a ``ValueError``.

    Example:
        >>> import numpy as np, arraybridge
        >>> arraybridge.convert(np.ones(2), "pytorch")
        Traceback (most recent call last):
            ...
        arraybridge.errors.UnknownFrameworkError: ...
    """


class MissingGpuWarning(UserWarning):
    """A GPU is missing, so an array was placed on the host (``missing_gpu="host"``).

    Example:
        >>> import warnings, torch, arraybridge
        >>> warnings.simplefilter("ignore", arraybridge.MissingGpuWarning)  # the host is fine
        >>> with arraybridge.settings(missing_gpu="host"):
        ...     x = arraybridge.to_gpu(torch.ones(2))
    """
