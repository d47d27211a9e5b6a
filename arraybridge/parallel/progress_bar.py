"""The progress bar of iterators."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

from arraybridge.errors import FrameworkNotInstalledError


def with_progress(results: Iterator[Any], name: str, items: Any) -> Iterator[Any]:
    """Yield the results, and count them in a progress bar on the standard error stream."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ModuleNotFoundError as error:
        raise FrameworkNotInstalledError(
            "The progress bar needs rich.",
            advice='Run pip install rich, or pip install ".[cli]" in a checkout of arraybridge.',
        ) from error
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(name, total=len(items) if isinstance(items, Sized) else None)
        try:
            for result in results:
                bar.advance(task)
                yield result
        finally:
            results.close()  # type: ignore[attr-defined]  # a generator
