"""A progress bar."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["with_progress"]


def with_progress(results: Iterator[Any], name: str, total: int | None) -> Iterator[Any]:
    """The results, with a bar on the standard error stream that counts them."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(name, total=total)
        try:
            for result in results:
                bar.advance(task)
                yield result
        finally:
            results.close()  # type: ignore[attr-defined]  # a generator
