"""Advice for errors that frameworks raise in conversions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import arraybridge
from tests.helpers import registry_kept


class Failing(arraybridge.Framework):
    """A framework whose import of memory raises an error with a given text."""

    name = "failing"
    modules = ("failing",)
    text = ""

    def owns(self, x: Any) -> bool:
        return False

    def host_view(self, x: Any) -> Any:
        raise NotImplementedError

    def from_host(self, view: Any, device: Any) -> Any:
        raise RuntimeError(self.text)


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("CUDA error: an illegal memory access was encountered", "Restart it"),
        ("cudaErrorIllegalAddress: an illegal memory access was encountered", "Restart it"),
        ("INTERNAL: CUDA error: Failed to synchronize: CUDA_ERROR_ILLEGAL_ADDRESS", "Restart it"),
        ("CUDA error: device-side assert triggered", "Restart it"),
        ("Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, use", "spawn"),
        ("cudaErrorInitializationError: initialization error", "spawn"),
        ("CUDA error: invalid argument", "plain, dense copy"),
    ],
)
def test_errors_that_no_conversion_can_avoid(text: str, advice: str) -> None:
    framework = Failing()
    framework.text = text  # type: ignore[misc]
    with registry_kept():
        arraybridge.register(framework)
        with pytest.raises(arraybridge.MemoryConversionError, match=advice) as caught:
            arraybridge.convert_memory(np.ones(2), "failing")
    assert text in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError)
