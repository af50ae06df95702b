"""Comparison in units of what is compared: the largest deviation over the largest value."""

import torch
import torch.distributed as dist
from torch import Tensor


def assert_close(got: Tensor | None, want: Tensor | None, what: str = "", tolerance: float = 1e-5) -> None:
    assert got is not None, f"{what}: nothing came"
    assert want is not None, f"{what}: nothing to compare with"
    assert got.shape == want.shape, f"{what}: {tuple(got.shape)} is not {tuple(want.shape)}"
    got, want = got.detach().double(), want.detach().double()
    if got.numel():
        error = float((got - want).abs().max()) / max(1e-30, float(want.abs().max()))
        assert error <= tolerance, f"{what}: off by {error:.3g} of the largest value"


def assert_same_on_all_ranks(tensor: Tensor, what: str = "", group: dist.ProcessGroup | None = None) -> None:
    """Bit for bit; without a process group there is one rank."""
    if not dist.is_initialized():
        return
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, tensor.contiguous(), group=group)
    assert all(torch.equal(one, tensor) for one in everyone), f"{what}: ranks differ"
