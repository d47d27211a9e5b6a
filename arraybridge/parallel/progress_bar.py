"""A progress bar that counts the results of an iterator."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

from arraybridge.errors import FrameworkNotInstalledError


def with_progress(results: Iterator[Any], name: str, items: Any) -> Iterator[Any]:
    """Yield the results, and count them in a progress bar on stderr.

    Args:
        results: A generator. It is closed when the caller stops iterating.
        name: The text in front of the bar.
        items: The items from which the results are computed. The bar shows their number if they
            have a length.

    Raises:
        FrameworkNotInstalledError: rich is not installed.
    """
    try:
        from rich import progress
        from rich.console import Console
    except ModuleNotFoundError as error:
        raise FrameworkNotInstalledError(
            "The progress bar requires rich, which is not installed.",
            advice='Run pip install rich, or pip install ".[cli]" in a checkout of arraybridge.',
        ) from error
    total = len(items) if isinstance(items, Sized) else None
    columns: list[progress.ProgressColumn] = [progress.TextColumn("{task.description}"), progress.BarColumn()]
    if total is None:
        columns += [progress.TextColumn("{task.completed:.0f} done"), progress.TimeElapsedColumn()]
    else:
        columns += [progress.MofNCompleteColumn(), progress.TimeRemainingColumn()]
    with progress.Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(name, total=total)
        try:
            for result in results:
                bar.advance(task)
                yield result
        finally:
            results.close()  # type: ignore[attr-defined]  # a generator
