"""Use complex128 arrays in PyTorch at NumPy's addresses: 8-byte alignment is sufficient for NumPy."""

from __future__ import annotations

import numpy as np
import torch

from arraybridge import convert_memory
from tests.matrix_data import aligned_bytes

for offset in (8, 4, 1):
    array = aligned_bytes(48 * 16, offset).view(np.complex128)
    for view in (array, array[::3], array.reshape(6, 8).T, array[1:2]):
        for _ in range(2):  # the second call uses a plan
            view[...] = np.arange(view.size).reshape(view.shape) * (1 + 2j)
            tensor = convert_memory(view, "torch")
            # Each of these operations crashes the process on memory that PyTorch assumes to be 16-byte
            # aligned.
            assert tensor.clone().tolist() == view.tolist(), offset
            assert tensor.flatten()[-1].item() == view.ravel()[-1], offset
            assert convert_memory(tensor, "torch", dtype="complex64").tolist() == view.tolist(), offset
            tensor.fill_(1)
            tensor.zero_()

# PyTorch itself also makes such tensors.
for n in (1, 2, 3, 9):
    for offset in (8, 4, 1):
        view = aligned_bytes(n * 16, offset).view(np.complex128)
        view[...] = np.arange(1, n + 1) * (1 + 2j)
        tensor = torch.from_numpy(view)
        for x, expected in (
            (tensor, view),
            (tensor.conj(), view.conj()),
            (tensor[::2], view[::2]),
            (tensor.detach().requires_grad_(), view),
        ):
            for target in ("torch", "numpy", "jax"):
                for _ in range(2):
                    copied = convert_memory(x, target, copy=True, grad="detach")
                    assert copied.tolist() == expected.tolist(), (n, offset, target)
            out = torch.zeros(len(expected), dtype=torch.complex128)
            assert convert_memory(x, out=out, grad="detach").tolist() == expected.tolist()
