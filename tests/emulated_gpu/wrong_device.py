"""`tests.gpu.device_calls` with a mistake: CuPy's methods stay on the current device."""

from __future__ import annotations

from contextlib import nullcontext

from tests.gpu import device_calls


def stay_on_the_current_device() -> None:
    """Replace the device guard with a context that does nothing."""
    import arraybridge.frameworks.cupy.framework as module

    module.on_gpu = lambda index: nullcontext()  # type: ignore[assignment]


if __name__ == "__main__":
    device_calls.main(stay_on_the_current_device)
