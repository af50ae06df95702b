"""How fast this card moves bytes and multiplies while every rank does: what the limits on a GPU are made of.

Streams are torch's own sum and copy over more than any cache holds. Random rows are read by the fastest reader there is:
torch's index_select, and the lookup kernels of every backend, over tables of the shape's width and length. Products are
torch's, of square matrices.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from launch.bench import embedding_all_to_all, limits
from launch.bench.limits import Rates, Traffic
from launch.bench.shapes import TORCH_DTYPES, EmbeddingShape, Shape
from launch.bench.variants import Timing, Variant

if TYPE_CHECKING:
    from launch.bench.cuda_session import CudaSession

MIB = 256
PINNED_MIB = 64
SELECTED_ROWS = 1 << 21
LINK_INPUTS = 4
PRODUCT_SIZE = 8192


class MeasuredRates:
    """Of one card, all its ranks together; each measured on first use. Collective."""

    def __init__(self, session: CudaSession) -> None:
        self._session = session
        self._gather: dict[EmbeddingShape, float] = {}
        self._products: dict[torch.dtype, float] = {}

    def of_memory(self, shape: Shape) -> Rates:
        read, copy = self._streams
        if not isinstance(shape, EmbeddingShape):
            flops = self.of_products(TORCH_DTYPES[shape.dtype]) if shape.traffic(self._ranks()).flops else None
            return Rates(read, copy, flops=flops)
        probe = shape.for_gather_rate()
        if probe not in self._gather:
            self._gather[probe] = self._measure_gather(probe)
        return Rates(read, copy, self._gather[probe])

    def of_products(self, dtype: torch.dtype) -> float:
        """FLOPs a second of matrix products, all ranks of the card together."""
        if dtype not in self._products:
            one, other = (
                torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, device=self._session.device).to(dtype) for _ in range(2)
            )
            out = torch.empty_like(one)
            [timing] = self._session.timer.measure([Variant("torch", "mm", lambda i: torch.mm(one, other, out=out))])
            self._products[dtype] = self._ranks() * 2 * PRODUCT_SIZE**3 / timing.ms * 1e3
        return self._products[dtype]

    def of_host_link(self) -> float:
        """Bytes a second one way, by the copy engines, when nothing goes the other way."""
        return self._one_way

    def _ranks(self) -> int:
        return self._session.settings.ranks_per_gpu

    @functools.cached_property
    def _streams(self) -> tuple[float, float]:
        source = torch.randn(MIB << 18, device=self._session.device)
        target = torch.empty_like(source)
        read = Variant("torch", "read", lambda i: source.sum())
        copy = Variant("torch", "copy", lambda i: target.copy_(source))
        of_read, of_copy = self._session.timer.measure([read, copy])
        nbytes = source.nbytes * self._ranks()
        return nbytes / of_read.ms * 1e3, 2 * nbytes / of_copy.ms * 1e3

    def _measure_gather(self, probe: EmbeddingShape) -> float:
        session, ranks = self._session, self._ranks()
        problem = embedding_all_to_all.Problem(session, probe)
        tables, _ = problem.weights()
        own = [c for c in session.candidates(probe) if c.backend != "unfused"]
        lookups = [v for candidate in own for v in embedding_all_to_all.lookups_alone(problem, candidate, tables)]
        rows = torch.randint(0, len(tables[0]), (SELECTED_ROWS,), device=session.device)
        select = Variant("torch", "select", lambda i: tables[0].index_select(0, rows))
        selected = ranks * rows.numel() * tables[0].shape[1] * tables[0].itemsize
        timings = session.measure([*lookups, select])

        def traffic(timing: Timing) -> Traffic:
            if timing.phase == "select":
                return Traffic(gathered=selected, read=ranks * rows.nbytes, written=selected)
            return probe.traffic(session.world).share(session.world // ranks)

        return max(limits.gather_rate(traffic(timing), timing.ms, *self._streams) for timing in timings)

    @functools.cached_property
    def _one_way(self) -> float:
        on_device = torch.randn(PINNED_MIB << 18, device=self._session.device)
        on_host = torch.empty(PINNED_MIB << 18, pin_memory=True).normal_()
        to_host = Variant("torch", "to_host", lambda i: on_host.copy_(on_device, non_blocking=True), None, LINK_INPUTS)
        from_host = Variant(
            "torch", "from_host", lambda i: on_device.copy_(on_host, non_blocking=True), None, LINK_INPUTS
        )
        timings = self._session.timer.measure([to_host, from_host])
        return on_device.nbytes * self._ranks() / min(timing.ms for timing in timings) * 1e3
