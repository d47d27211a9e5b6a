"""A kernel in Triton, which reads its source from the file that it stands in."""

import torch
import triton
import triton.language as tl


@triton.jit
def add_one(x, out, n, BLOCK: tl.constexpr):  # noqa: N803
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)


def plus_one(x: torch.Tensor) -> torch.Tensor:
    """``x + 1``, on torch's current stream."""
    out = torch.empty_like(x)
    add_one[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), BLOCK=1024)
    return out
