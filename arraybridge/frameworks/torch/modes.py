"""Modes of torch in which a function runs that gradients flow through: what they notice and refuse."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from arraybridge.errors import GradientError
from arraybridge.frameworks.autodiff import captured, draws_again, hidden
from arraybridge.frameworks.within import found_within

__all__ = [
    "Captures",
    "Drawing",
    "NoGenerators",
    "NoMemory",
    "Untouched",
    "are_hooks_set",
    "reads_its_own",
    "refuse_hidden",
    "without_hooks",
]


#: Whether a function of torch runs, inside of one of another framework, that gradients flow through: what
#: it computes requires grad, and its numbers are its own to read.
reads_its_own: ContextVar[bool] = ContextVar("reads_its_own", default=False)


class Captures(TorchFunctionMode):  # type: ignore[misc]  # torch is Any here
    """Gives away copies of tensors, since nobody notices what is written to them before the backward.

    And no numbers of what requires grad, which torch does but for arrays.
    """

    def __init__(self, label: str) -> None:
        super().__init__()
        self.label = label

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _GIVING_AWAY:
            args = (args[0].clone(), *args[1:])
        elif func in _GIVING_NUMBERS and args[0].requires_grad and not reads_its_own.get():
            raise captured(
                "torch",
                f"{self.label}(): it reads the numbers of a tensor that requires grad; or .detach() it",
            )
        return func(*args, **(kwargs or {}))


#: Ways to the memory of a tensor; each calls the next ones with such a copy, outside of the mode.
_GIVING_NUMBERS = (
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.__float__,
    torch.Tensor.__complex__,
)
_GIVING_AWAY = (torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__, torch._C._to_dlpack)


class NoMemory(TorchFunctionMode):  # type: ignore[misc]  # torch is Any here
    """Refuses to give away the memory of tensors without values, which have none."""

    def __init__(self, label: str, mode: Any) -> None:
        super().__init__()
        self.label, self.mode = label, mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _GIVING_AWAY and self.mode.is_our_fake(args[0]):
            raise GradientError(
                f"{self.label}(): inside jax.jit its shapes have to be foretold, and it gives the memory of a"
                " tensor away, which has no values there; call the function outside of jax.jit",
                reason="shapes cannot be foretold",
            )
        return func(*args, **(kwargs or {}))


class Untouched(TorchDispatchMode):  # type: ignore[misc]  # torch is Any here
    """Lets a function that runs without values write to tensors without values alone.

    torch would compute what has values beforehand, and write to a buffer, half of what the function does.
    """

    def __init__(self, mode: Any) -> None:
        super().__init__()
        self.mode = mode
        self.written: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        writes = func._schema.is_mutable

        def stand_in(x: Any) -> Any:
            if not isinstance(x, torch.Tensor) or self.mode.is_our_fake(x):
                return x
            if writes:
                self.written.append(x)
            elif not any(x is y for y in self.written):
                return x
            return self.mode.from_tensor(x)

        args, kwargs = tree_map(stand_in, (args, kwargs or {}))
        return func(*args, **kwargs)


class NoGenerators(TorchFunctionMode):  # type: ignore[misc]  # torch is Any here
    """Refuses draws from a generator of the user's own, whose state nobody here knows."""

    def __init__(self, label: str) -> None:
        super().__init__()
        self.label = label

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        generator = (kwargs or {}).get("generator")
        if generator is not None and generator not in (
            torch.default_generator,
            *torch.cuda.default_generators,
        ):
            raise draws_again("torch", self.label, " from a torch.Generator", "leave generator= out")
        return func(*args, **(kwargs or {}))


class Drawing(TorchDispatchMode):  # type: ignore[misc]  # torch is Any here
    """Notices operations that draw random numbers, in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.found.append(func)
        return func(*args, **(kwargs or {}))


_saving_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def without_hooks() -> AbstractContextManager[Any]:
    """A context without the hooks of whoever saves tensors: these would count what has no values, too."""
    hooks = torch.autograd.graph.saved_tensors_hooks
    return hooks(_itself, _itself) if are_hooks_set() else nullcontext()


def are_hooks_set() -> bool:
    """Whether somebody hooks into what is saved: torch.utils.checkpoint, which computes it again."""
    return _saving_hooks is None or _saving_hooks(False) is not None


def _itself(x: Any) -> Any:
    return x


def refuse_hidden(leaves: Sequence[Any], arrays: Sequence[Any], label: str) -> None:
    """Refuse arguments, and tensors with a graph, inside of results that are no containers."""
    known = set(map(id, arrays))

    def is_followed(x: Any) -> bool:
        return issubclass(type(x), torch.Tensor) and (x.grad_fn is not None or id(x) in known)

    if found_within((x for x in leaves if not isinstance(x, torch.Tensor)), is_followed) is not None:
        raise hidden("torch", label)
