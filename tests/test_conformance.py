"""The conformance suite for plug-ins: it passes correct plug-ins, and identifies broken ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge.device import Device
from arraybridge.interface.batching import Batching
from arraybridge.interface.component import component
from arraybridge.interface.devices import Devices
from arraybridge.testing import FrameworkCheckError, check_framework
from tests.decorators.cases import Box, BoxFramework
from tests.helpers import require


class Boxes(BoxFramework):
    """A correct plug-in."""

    dtypes = frozenset(("bool", "int8", "int32", "int64", "float32", "float64", "complex64"))


class Narrows(Boxes):
    def from_host(self, view: np.ndarray[Any, Any], device: Device) -> Any:
        with np.errstate(over="ignore"):
            return Box(view.astype(np.float32) if view.dtype == np.float64 else view)


class Misnames(Boxes):
    def dtype_name(self, x: Any) -> str:
        return "int32" if x.memory.dtype == np.int64 else super().dtype_name(x)


class DropsARowBatching(Batching):
    def concatenate(self, parts: list[Any], axis: int) -> Any:
        return Box(np.concatenate([part.memory for part in parts[:-1]], axis))


class DropsARow(Boxes):
    batching = component(DropsARowBatching)


class CopiesSilently(Boxes):
    """A plug-in that claims to share memory, and exposes a copy."""

    def host_view(self, x: Any) -> np.ndarray[Any, Any]:
        return np.array(x.memory, order="K", copy=True)


class SharesSilently(Boxes):
    """A plug-in that claims to always copy, and stores the given memory."""

    alignment = 0


class SharesItsCopies(Boxes):
    def copy(self, x: Any) -> Any:
        return Box(x.memory)


class SharesItsHostMemory(Boxes):
    def to_host(self, x: Any) -> np.ndarray[Any, Any]:
        return np.asarray(x.memory)


class CachesItsHostMemory(Boxes):
    def to_host(self, x: Any) -> np.ndarray[Any, Any]:
        if not hasattr(x, "cached"):
            x.cached = x.memory.copy()
        cached: np.ndarray[Any, Any] = x.cached
        return cached


class Frozen(Boxes):
    """A plug-in with immutable arrays."""

    mutable = False

    def host_view(self, x: Any) -> np.ndarray[Any, Any]:
        view: np.ndarray[Any, Any] = x.memory.view()
        view.flags.writeable = False
        return view


class FrozenSharesItsCopies(Frozen):
    def copy(self, x: Any) -> Any:
        return Box(x.memory)


class SharesItsCasts(Boxes):
    def cast(self, x: Any, dtype: str) -> Any:
        element = np.dtype(dtype)
        cast = x.memory.astype(element)
        if element.itemsize == x.memory.itemsize:  # in place, as if the array were no longer needed
            memory = x.memory.view(element)
            memory[...] = cast
            return Box(memory)
        return Box(cast)


class SharesItsEmptyMemoryBatching(Batching):
    def empty(self, shape: tuple[int, ...], dtype: str, device: Device) -> Any:
        if not hasattr(self.framework, "storage"):
            self.framework.storage = np.empty(1 << 12, np.uint8)
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return Box(self.framework.storage[:size].view(dtype).reshape(shape))


class SharesItsEmptyMemory(Boxes):
    batching = component(SharesItsEmptyMemoryBatching)


class JoinsOneToItselfBatching(Batching):
    def concatenate(self, parts: list[Any], axis: int) -> Any:
        return parts[0] if len(parts) == 1 else super().concatenate(parts, axis)


class JoinsOneToItself(Boxes):
    batching = component(JoinsOneToItselfBatching)


class Pooled(Box):
    """An array whose memory returns to a pool with it, where the next array overwrites it."""

    def __del__(self) -> None:
        if self.memory.flags.writeable:
            self.memory[...] = 0


class FreesMemoryEarly(Boxes):
    def from_host(self, view: np.ndarray[Any, Any], device: Device) -> Any:
        return Pooled(view)


class IsNowhereDevices(Devices):
    def device_of(self, x: Any) -> Device:
        return Device("cpu", 7)


class HasNoDevice(Boxes):
    devices = component(IsNowhereDevices)


class ClaimsTooMuch(Boxes):
    """A plug-in that claims to support float16, and does not."""

    dtypes = Boxes.dtypes | {"float16"}

    def from_host(self, view: np.ndarray[Any, Any], device: Device) -> Any:
        if view.dtype == np.float16:
            raise RuntimeError("no kernel for half")
        return Box(view)


def test_correct_plugins_pass() -> None:
    made: list[np.ndarray[Any, Any]] = []

    def make(values: np.ndarray[Any, Any]) -> Box:
        made.append(values)
        return Box(values.copy())

    check_framework(Frozen()).raise_if_broken()
    for report in (check_framework(Boxes()), check_framework(Boxes(), make)):
        report.raise_if_broken()
        assert report
        assert all(one.cases for one in report.verdicts)
    assert {x.dtype.name for x in made} == Boxes.dtypes, "every dtype must be made by make()"
    assert "boxes" not in arraybridge.interface.registry.framework_names()


@pytest.mark.parametrize(
    ("broken", "first", "also"),
    [
        (Narrows, "dtypes", {"layouts", "casts", "splitting"}),
        (Misnames, "names", {"casts", "dtypes", "layouts", "splitting"}),
        (DropsARow, "splitting", set()),
        (CopiesSilently, "sharing", set()),
        (SharesSilently, "copies", {"sharing", "read_only"}),
        (SharesItsCopies, "copies", set()),
        (SharesItsHostMemory, "copies", set()),
        (CachesItsHostMemory, "copies", set()),
        (FrozenSharesItsCopies, "copies", set()),
        (SharesItsCasts, "casts", set()),
        (SharesItsEmptyMemory, "copies", set()),
        (JoinsOneToItself, "splitting", set()),
        (FreesMemoryEarly, "lifetime", {"casts"}),
        (HasNoDevice, "devices", set()),
        (ClaimsTooMuch, "dtypes", {"names", "layouts", "casts", "splitting"}),
    ],
)
def test_broken_plugins_are_identified(broken: type[Boxes], first: str, also: set[str]) -> None:
    """Check that each plug-in fails on its own broken promise, and only on others that depend on it."""
    report = check_framework(broken())
    assert first in report.broken, str(report)
    assert set(report.broken) <= {first} | also, str(report)
    with pytest.raises(FrameworkCheckError, match=first):
        report.raise_if_broken()


def test_failures_are_described() -> None:
    report = check_framework(Narrows(), only=("dtypes", "refusals"))
    assert report.broken == ["dtypes"]
    (failure,) = report.verdicts[0].failures
    assert failure == "dtype=float64: the dtype is float32 instead of float64"
    text = str(report)
    assert text.splitlines()[0].split() == ["promise", "cases", "failed", "first", "failure"]
    assert text.endswith(f"boxes: 1 of 2 promises kept, {sum(one.cases for one in report.verdicts)} cases")
    assert failure in text
    assert "<table" in report._repr_html_()
    with pytest.raises(ValueError, match=r"'layout', which is not a promise\..*'layouts'"):
        check_framework("numpy", only="layout")
    with pytest.raises(TypeError, match=r"^only=5 must be the name of a promise or a list of names"):
        check_framework("numpy", only=5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"expected the name of a framework or an instance, got 5\. Pass a"):
        check_framework(5)  # type: ignore[arg-type]


ALL = ("numpy", "torch", "jax", "tensorflow", "pyclesperanto", "mlx", "paddle")


@pytest.mark.parametrize("name", [*ALL, pytest.param("cupy", marks=pytest.mark.gpu)])
def test_all_frameworks_conform(name: str) -> None:
    require({"mlx": "mlx.core"}.get(name, name))
    check_framework(name).raise_if_broken()
