"""Graph breaks of torch.compile, which cannot trace conversions: traced tensors have no memory."""

from __future__ import annotations

import sys
from contextlib import suppress

__all__ = ["NO_FULL_GRAPH", "break_graph", "is_compiling"]

#: The reason for a graph break. torch.compile quotes it in its error if called with ``fullgraph=True``.
NO_FULL_GRAPH = (
    "arraybridge converts between frameworks outside of a graph. Do not pass fullgraph=True. To compile a"
    " decorated function, write @torch.compile below its decorator."
)


def is_compiling() -> bool:
    """Return whether torch.compile traces the caller."""
    return "torch._dynamo" in sys.modules and bool(sys.modules["torch"].compiler.is_dynamo_compiling())


def break_graph() -> None:
    """Break the graph if torch.compile traces the caller."""
    if is_compiling():
        with suppress(TypeError):  # early releases have no msg=
            sys.modules["torch._dynamo"].graph_break(msg=NO_FULL_GRAPH)
