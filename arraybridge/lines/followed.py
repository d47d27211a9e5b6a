"""Arrays that are being differentiated, on their way to other threads and processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from arraybridge.errors import GradientError
from arraybridge.frameworks import registry
from arraybridge.trees import ARRAY, LEAF, arrays_of, kinds
from arraybridge.types import TypeMemo

__all__ = ["for_other_threads", "refuse_graphs"]


def for_other_threads(items: Iterator[Any]) -> Iterator[Any]:
    """Items for functions that other threads run, where tapes and tracers of this one do not follow.

    Raises:
        GradientError: later, for an item that one of them follows.
    """
    for item in items:
        cls = type(item)
        if cls in _free or kinds.get(cls) == LEAF:
            yield item
            continue
        if kinds.get(cls) == ARRAY and not _belongs_to_a_thread(item):
            _free.keep(cls, True)
        for name in _followed(item, in_this_thread=True):
            raise GradientError(
                f"an array of {name} is being differentiated in this thread, and the function runs in another"
                " one, where its tape or tracer does not follow: it would get no gradient. Call the function"
                " itself, differentiate inside of what the other thread runs, or pass the array without what"
                " follows it, as by tf.stop_gradient(x)",
                source_type=name,
                reason="differentiated in another thread",
            )
        yield item


#: Types of arrays that nothing of one thread alone can follow.
_free: TypeMemo[bool] = TypeMemo()
registry.on_register.append(_free.clear)


def _belongs_to_a_thread(array: Any) -> bool:
    owner = registry.find_owner(array)
    return owner is not None and owner.autodiff is not None and not owner.autodiff.crosses_threads


def refuse_graphs(result: Any) -> None:
    """Refuse what would come out of a process without the graph that it has there.

    Raises:
        GradientError: an array of it is being differentiated.
    """
    for name in _followed(result, in_this_thread=False):
        raise GradientError(
            f"an array of {name} among the results is being differentiated, and its graph stays in the"
            " process that made it: a backward pass would give nothing, in silence. Return it without, as"
            " x.detach(), or compute under torch.no_grad(); for gradients call the function in this process",
            source_type=name,
            reason="a graph does not leave its process",
        )


def _followed(item: Any, *, in_this_thread: bool) -> Iterator[str]:
    """The frameworks that follow an array of this; ``in_this_thread``: and nowhere else."""
    for leaf in arrays_of(item):
        owner = registry.find_owner(leaf)
        if owner is None or owner.autodiff is None or (in_this_thread and owner.autodiff.crosses_threads):
            continue
        if owner.autodiff.is_differentiated(leaf):
            yield owner.name
