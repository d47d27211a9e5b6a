"""The suite for plug-ins: it passes what is right, and tells broken plug-ins apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge.testing import FrameworkCheckError, check_framework
from arraybridge.testing.promises import PROMISES
from arraybridge.types import Device
from tests.helpers import require


class Box:
    """An array type of no library."""

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self.values = values

    def __getitem__(self, key: Any) -> Box:
        return Box(self.values[key])


class Boxes(arraybridge.Framework):
    """A plug-in that is right."""

    name = "boxes"
    modules = (Box.__module__.partition(".")[0],)

    def owns(self, x: Any) -> bool:
        return isinstance(x, Box)

    def host_view(self, x: Any) -> np.ndarray[Any, Any]:
        return x.values  # type: ignore[no-any-return]

    def from_host(self, view: np.ndarray[Any, Any], device: Device) -> Any:
        return Box(view)

    def dtype_name(self, x: Any) -> str:
        return str(x.values.dtype.name)

    def shape(self, x: Any) -> tuple[int, ...]:
        return tuple(x.values.shape)

    def nbytes(self, x: Any) -> int:
        return int(x.values.nbytes)

    dtypes = frozenset(("bool", "int8", "int32", "int64", "float32", "float64", "complex64"))


class Narrows(Boxes):
    def from_host(self, view: np.ndarray[Any, Any], device: Device) -> Any:
        with np.errstate(over="ignore"):
            return Box(view.astype(np.float32) if view.dtype == np.float64 else view)


class Misnames(Boxes):
    def dtype_name(self, x: Any) -> str:
        return "int32" if x.values.dtype == np.int64 else super().dtype_name(x)


class DropsARow(Boxes):
    def concatenate(self, parts: list[Any], axis: int) -> Any:
        return Box(np.concatenate([part.values for part in parts[:-1]], axis))


class MixesRows(Boxes):
    def concatenate(self, parts: list[Any], axis: int) -> Any:
        return Box(np.concatenate([part.values for part in reversed(parts)], axis))


class CopiesInSecret(Boxes):
    """It says that memory is shared, and shows a copy."""

    def host_view(self, x: Any) -> np.ndarray[Any, Any]:
        return np.array(x.values, order="K", copy=True)


class TakesACopyInSecret(Boxes):
    def from_host(self, view: np.ndarray[Any, Any], device: Device) -> Any:
        return Box(view.copy())


class SharesInSecret(Boxes):
    """It says that it always copies, and keeps what it is given."""

    alignment = 0


class Pooled(Box):
    """Its memory goes back to a pool with it, and the next array writes there."""

    def __del__(self) -> None:
        if self.values.flags.writeable:
            self.values[...] = 0


class LetsMemoryDie(Boxes):
    def from_host(self, view: np.ndarray[Any, Any], device: Device) -> Any:
        return Pooled(view)


class TakesAllForOom(Boxes):
    def is_oom(self, error: BaseException) -> bool:
        return isinstance(error, (MemoryError, RuntimeError))


class IsNowhere(Boxes):
    def device_of(self, x: Any) -> Device:
        return Device("cpu", 7)


class ClaimsTooMuch(Boxes):
    """It says that it holds float16, and does not."""

    dtypes = Boxes.dtypes | {"float16"}

    def from_host(self, view: np.ndarray[Any, Any], device: Device) -> Any:
        if view.dtype == np.float16:
            raise RuntimeError("no kernel for half")
        return Box(view)


def test_a_right_plugin_passes() -> None:
    report = check_framework(Boxes())
    assert report.ok, str(report)
    assert report
    report.raise_if_broken()
    assert all(one.cases for one in report.verdicts)
    assert "boxes" not in arraybridge.frameworks.registry.framework_names()


@pytest.mark.parametrize(
    ("broken", "first", "also"),
    [
        (Narrows, "dtypes", {"layouts", "casts", "splitting"}),
        (Misnames, "names", {"casts", "dtypes", "layouts", "splitting"}),
        (DropsARow, "splitting", set()),
        (MixesRows, "splitting", set()),
        (CopiesInSecret, "sharing", set()),
        (TakesACopyInSecret, "sharing", set()),
        (SharesInSecret, "copies", {"sharing", "read_only"}),
        (LetsMemoryDie, "lifetime", {"casts", "functions"}),
        (TakesAllForOom, "oom", set()),
        (IsNowhere, "devices", set()),
        (ClaimsTooMuch, "dtypes", {"names", "layouts", "casts", "splitting"}),
    ],
)
def test_broken_plugins_are_told_apart(broken: type[Boxes], first: str, also: set[str]) -> None:
    """Each fails on its own promise, and on no other but those that stand on it."""
    report = check_framework(broken())
    assert first in report.broken, str(report)
    assert set(report.broken) <= {first} | also, str(report)
    with pytest.raises(FrameworkCheckError, match=first):
        report.raise_if_broken()


def test_the_first_failure_can_be_repeated_by_its_line() -> None:
    report = check_framework(Narrows(), only=("dtypes", "oom"))
    verdict = report.verdicts[0]
    assert (verdict.failed, report.broken) == (1, ["dtypes"])
    assert "float32" in verdict.first
    assert "float64" in verdict.first
    text = str(report)
    assert text.splitlines()[0].split() == ["promise", "cases", "failed", "first", "failure"]
    assert text.endswith(f"boxes: 1 of 2 promises kept, {sum(one.cases for one in report.verdicts)} cases")
    assert verdict.repeat in text
    assert "<table" in report._repr_html_()
    arraybridge.register(Narrows())
    try:
        names = {**vars(arraybridge), "sample": arraybridge.testing.sample}
        assert eval(verdict.repeat, names).dtype == np.float32  # noqa: S307  # the suite's own line
    finally:
        arraybridge.frameworks.registry.unregister("boxes")


def test_what_is_asked_for_is_tried_alone() -> None:
    report = check_framework("numpy", only=("dtypes", "oom"))
    assert [one.promise for one in report.verdicts] == ["dtypes", "oom"]
    with pytest.raises(ValueError, match=r"'layout' is no promise.*did you mean 'layouts'"):
        check_framework("numpy", only="layout")


def test_arrays_can_be_made_by_its_own_calls() -> None:
    made: list[np.ndarray[Any, Any]] = []

    def make(values: np.ndarray[Any, Any]) -> Box:
        made.append(values)
        return Box(values.copy())

    assert check_framework(Boxes(), make, only="names").ok
    assert len(made) == len(Boxes.dtypes)


ALL = ("numpy", "torch", "jax", "tensorflow", "pyclesperanto", "mlx", "paddle")


@pytest.mark.parametrize("name", [*ALL, pytest.param("cupy", marks=pytest.mark.gpu)])
def test_every_framework_keeps_the_promises(name: str) -> None:
    module = require({"mlx": "mlx.core"}.get(name, name))
    # pyclesperanto-prototype on PoCL ends the process where several threads use it ("PTHREAD ERROR in
    # pocl_lock_events_inorder"), with no error to catch; its conversions are tried in one thread alone.
    unsafe = {"threads"} if module.__name__ == "pyclesperanto_prototype" else set()
    check_framework(name, only=[promise for promise in PROMISES if promise not in unsafe]).raise_if_broken()


def test_the_shortest_file_of_the_guide_keeps_the_promises() -> None:
    require("paddle")
    from tests.plugin.whole.twenty_lines import PaddleOnTheCpu

    check_framework(PaddleOnTheCpu()).raise_if_broken()
