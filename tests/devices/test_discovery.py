"""What is here: names, numbers, memory, and the same card under one number."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import Device, devices, machine
from arraybridge.devices import discovery
from arraybridge.frameworks.base import Framework
from arraybridge.frameworks.parts import Pool
from arraybridge.machine import Card
from tests.cards import CardFramework
from tests.helpers import require, run_python
from tests.test_machine import FakeNvml, plant

FIRST = Card(0, "Card A", "GPU-aaaa", "0000:3b:00.0", 8 << 30)
SECOND = Card(1, "Card B", "GPU-bbbb", "0000:5e:00.0", 4 << 30)


class Cards(CardFramework):
    """Devices and cards are what a test says."""

    has_host = True

    def __init__(self, told: dict[str, str]) -> None:
        super().__init__()
        self.cards = tuple(map(Device.parse, told))
        self.pool = ToldPool(told)


class ToldPool(Pool):
    def __init__(self, told: dict[str, str]) -> None:
        self.told = told

    def card_of(self, device: Device) -> tuple[str, str, int | None]:
        return "", self.told.get(str(device), ""), None


@pytest.fixture
def two_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, FakeNvml(("Card A", "GPU-aaaa", 0x3B, ()), ("Card B", "GPU-bbbb", 0x5E, ())))
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")


def listed(monkeypatch: pytest.MonkeyPatch, *frameworks: Framework) -> list[Any]:
    monkeypatch.setattr(discovery, "_frameworks", lambda named: list(frameworks))
    return devices()


@pytest.mark.parametrize("name", ["numpy", "torch", "jax", "tensorflow", "pyclesperanto"])
def test_they_are_those_of_the_framework_and_are_accepted_as_their_words_are(name: str) -> None:
    require(name)
    listed, every = devices(name), devices("all")
    assert listed == list(arraybridge.framework(name).devices())
    assert all(name in next(one for one in every if one == device).frameworks for device in listed)
    for device in listed:
        assert device.frameworks == (name,)
        assert str(device) == device == Device(device.kind, device.index)
        assert device.total is None or 0 < (device.free or 1) < device.total
        for words in (device, str(device)):
            x = arraybridge.convert_memory(np.zeros((2, 2), np.float32), name, device=words)
            assert arraybridge.device_of(x) == device


@pytest.mark.usefixtures("two_cards")
def test_cards_have_names_and_identities(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"gpu:0": "GPU-aaaa", "gpu:1": "0000:5e:00.0", "opencl:0": "0000:5e:00.0", "opencl:1": ""}
    found = {str(d): d for d in listed(monkeypatch, Cards(told))}
    assert list(found) == ["cpu", "gpu:0", "gpu:1", "opencl:0", "opencl:1"]
    assert found["gpu:0"].name == "Card A"
    assert found["gpu:0"].identity == "GPU-aaaa"
    assert (found["gpu:0"].total, found["gpu:0"].free) == (1000, 100)
    assert found["opencl:0"].identity == found["gpu:1"].identity == "GPU-bbbb"
    assert found["opencl:1"].identity == ""


def _opencl(monkeypatch: pytest.MonkeyPatch, cards: tuple[Card, ...], *addresses: str) -> Any:
    """OpenCL devices of the tests: the two cards the other way round, and a CPU."""
    from arraybridge.frameworks.pyclesperanto import arrays as pyclesperanto

    require("pyclesperanto")
    one: Any = copy.copy(arraybridge.framework("pyclesperanto"))
    vars(one).pop("described", None)
    names = ("Card B", "Card A", "CPU")
    monkeypatch.setattr(pyclesperanto, "cards", lambda: cards)
    seen = [(name, address, 1) for name, address in zip(names, addresses, strict=True)]
    monkeypatch.setattr(pyclesperanto.opencl, "described", lambda: seen)
    one._arrange([SimpleNamespace(name=name) for name in names], 2)
    return one


def test_opencl_numbers_mean_the_cards_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    one = _opencl(monkeypatch, (FIRST, SECOND), SECOND.pci, FIRST.pci, "")
    assert [str(one.accelerator(i)) for i in range(3)] == ["opencl:0", "opencl:1", "opencl:2"]
    assert [native.name for native in one.natives] == ["Card A", "Card B", "CPU"]
    assert str(one.find_device(Device("gpu", 0))) == "opencl:0"
    assert one.pool.card_of(Device("opencl", 0)) == ("Card A", FIRST.pci, 1)
    other = Card(0, "Card C", "GPU-cccc", "0000:01:00.0", 1)
    one = _opencl(monkeypatch, (other, FIRST), SECOND.pci, FIRST.pci, "")
    with pytest.raises(arraybridge.DeviceNotFoundError, match="Card C"):
        one.accelerator(0)


# -- in one line -------------------------------------------------------------------------------------


def test_without_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cards", lambda: ())
    monkeypatch.setattr(discovery, "loaded", lambda: [arraybridge.framework("numpy")])
    assert not arraybridge.gpu_available()
    assert arraybridge.least_used_gpu() is None
    info = arraybridge.device_info()
    assert (info["available"], info["backend"], info["names"]) == (False, "cpu", [])
    assert str(info) == "no GPU; arrays live on the host"


@pytest.mark.usefixtures("two_cards")
def test_cards_are_listed_before_a_framework_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "loaded", lambda: [arraybridge.framework("numpy")])
    listed = {str(device): device for device in devices()}
    assert list(listed) == ["cpu", "gpu:0", "gpu:1"]
    assert (listed["gpu:1"].name, listed["gpu:1"].frameworks) == ("Card B", ())
    assert arraybridge.least_used_gpu() == 0  # the first of equals
    monkeypatch.setattr(machine._nvml()[0], "free", {"GPU-aaaa": 3})
    assert arraybridge.least_used_gpu() == 1
    info = arraybridge.device_info()
    assert (info["available"], info["backend"]) == (True, "cuda")
    assert info["memory"] == [(1000, 3), (1000, 100)]
    assert info["versions"]["numpy"]
    assert str(info) == "cuda: gpu:0 Card A, gpu:1 Card B"


def test_those_that_are_loaded_unless_all_are_asked_for() -> None:
    code = (
        "import sys, arraybridge; found = arraybridge.devices();"
        " print(sorted({n for d in found for n in d.frameworks}), 'jax' in sys.modules);"
        " found = arraybridge.devices('jax'); print('jax' in found[0].frameworks)"
    )
    require("jax")
    done = run_python("-c", code)
    assert done.stdout.splitlines() == ["['numpy'] False", "True"], done.stderr
