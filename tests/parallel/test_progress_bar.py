"""Test the progress bar that counts results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from arraybridge.parallel.progress_bar import with_progress


def double(items: Iterable[int]) -> Iterator[int]:
    for item in items:
        yield 2 * item


@pytest.mark.parametrize(("items", "count"), [([1, 2, 3], "3/3"), (iter([1, 2, 3]), "3 done")])
def test_bar_shows_the_total_if_it_is_known(
    items: Iterable[int], count: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert list(with_progress(double(items), "double", items)) == [2, 4, 6]
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("double ")
    assert f" {count} " in line
    assert "?" not in line
    assert captured.out == ""
