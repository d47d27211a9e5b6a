"""Functions that other processes import: what ``processes=True`` runs."""

from __future__ import annotations

import os
from typing import Any

import arraybridge


def square(x: Any) -> Any:
    return x * x


def fail_at_three(x: int) -> int:
    if x == 3:
        raise LookupError("three")
    return x


class StrangeError(Exception):
    """Pickles, but does not come back: its argument is missing then."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)
        self.second = second


def fail_strangely(x: int) -> int:
    raise StrangeError("first", "second")


def die(x: int) -> int:
    os._exit(7)


def process_and_item(x: int) -> tuple[int, int]:
    return os.getpid(), x


@arraybridge.jax(output_type="numpy")
def device_number(x: Any) -> Any:
    (device,) = x.devices()
    return x * 0 + device.id


def make_model() -> tuple[int, str]:
    """A model: the process that made it, and the device that it was made for."""
    return os.getpid(), str(arraybridge.get_device())


def apply_model(model: tuple[int, str], x: int) -> tuple[int, str, int, str]:
    return *model, x, str(arraybridge.get_device())


def fail_to_make() -> None:
    raise LookupError("no model here")
