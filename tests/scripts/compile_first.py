"""torch.compile around a decorated function as the very first thing that the library is used for."""

import torch

import arraybridge


@arraybridge.torch
def double(x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"y": x * 2}


compiled = torch.compile(lambda x: double(x)["y"] + 1, backend="eager", fullgraph=True)
print(compiled(torch.ones(2)).tolist())
