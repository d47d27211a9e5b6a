"""Names for what happens here in other people's profilers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from arraybridge.errors import FrameworkNotInstalledError
from arraybridge.frameworks import registry

__all__ = ["span_of"]


def span_of(profiler: str) -> Callable[[str], AbstractContextManager[Any]]:
    """What opens a span of a name in the profiler.

    Raises:
        FrameworkNotInstalledError: its package is missing.
    """
    if profiler != "nvtx":
        return registry.framework(profiler).annotation
    try:
        import nvtx
    except ImportError as error:
        raise FrameworkNotInstalledError(
            'settings(annotate="nvtx") needs the package nvtx; run pip install nvtx, or pip install ".[nvtx]"'
            " in a checkout of arraybridge.",
            target_type="nvtx",
            reason=str(error),
        ) from error
    span: Callable[[str], AbstractContextManager[Any]] = partial(nvtx.annotate, domain="arraybridge")
    return span
