"""A rank on a GPU: its share of the card, a group a link, communicators of several sizes, one block of memory for tables."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import fused_ops
from launch.bench import gpu_links, limits, nccl_groups, operators, torch_symmetric
from launch.bench.agreement import Rehearsal
from launch.bench.cuda_graphs import capture
from launch.bench.cuda_rates import MeasuredRates
from launch.bench.cuda_timing import CudaTimer
from launch.bench.settings import BenchSettings, as_list, backends, shapes
from launch.bench.shapes import EmbeddingShape, Shape
from launch.bench.variants import USES_LIBRARY, Candidate, Timing, Variant, exists, inputs_beyond
from launch.lab import nccl
from trainers.card import take_card

NCCL_INPUTS, NCCL_ROUNDS = 4, 3


class CudaSession:
    def __init__(
        self, settings: BenchSettings, rank: int, address: str, tell: Callable[[tuple[str, Any]], None]
    ) -> None:
        self.settings, self.rank, self.world, self._tell = settings, rank, settings.ranks, tell
        self.device = take_card(rank, settings.ranks_per_gpu)
        self._properties = torch.cuda.get_device_properties(self.device)
        timeout = timedelta(seconds=settings.timeout_s)
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=self.world, timeout=timeout)
        fused_ops.set_timeout(settings.timeout_s)
        self._groups = {link: self._group_over(link) for link in as_list(settings.link)}
        self._said: set[tuple[str, str]] = set()
        self._communicators = self._make_communicators()
        self._groups_of_auto: dict[tuple[str, int], dist.ProcessGroup] = {}
        self._table_memory = torch.empty(self._largest_tables(), dtype=torch.uint8, device=self.device)
        self.timer = CudaTimer(
            self._meeting(), settings.rounds, settings.warmup, settings.iterations, settings.graph, settings.budget_s
        )
        self._rates = MeasuredRates(self)
        self._link = ""
        self._candidates: list[Candidate] = []

    def _group_over(self, link: str) -> dist.ProcessGroup:
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)
        fused_ops.set_link(link, group)
        fused_ops.all_to_all(
            torch.ones(self.world, 1, device=self.device), group=group, comm="cuda"
        )  # sets the link up
        return group

    def _make_communicators(self) -> dict[int, dist.ProcessGroup]:
        """By their CTAs; none where no column uses NCCL."""
        if not set(USES_LIBRARY) & set(backends(self.settings)):
            return {}
        if self.settings.ranks_per_gpu > 1:
            nccl.check(nccl.loaded_version(), f"torch on rank {self.rank}")  # whether the preloaded one is in front
        wanted, sms = as_list(self.settings.nccl_max_ctas), self._properties.multi_processor_count
        fitting = nccl_groups.fitting(wanted, sms, self.settings.ranks_per_gpu)
        return {ctas: nccl_groups.make(ctas, self.settings.timeout_s) for ctas in fitting}

    def _largest_tables(self) -> int:
        """Bytes of the largest shape's tables on this rank."""
        every = [shape for link in as_list(self.settings.link) for shape in shapes(self.settings, link)]
        embedding = [shape for shape in every if isinstance(shape, EmbeddingShape)]
        return max((max(s.table_bytes, s.for_gather_rate().table_bytes) for s in embedding), default=0)

    def _meeting(self) -> Callable[[], None]:
        """Enqueues an exchange of a few bytes, which no rank leaves before all have come. Replayed, so that it costs no time
        to enqueue."""
        group, stream = dist.new_group(backend="gloo"), torch.cuda.Stream()
        word = torch.ones(self.world, 1, device=self.device)

        def meet(i: int = 0) -> None:
            fused_ops.all_to_all(word, group=group, comm="cuda")

        with torch.cuda.stream(stream):
            meet()
            meet()
        torch.cuda.synchronize()
        graph = capture(meet, 1, stream, None)
        if isinstance(graph, str):
            raise RuntimeError(f"the ranks' meeting cannot be captured: {graph}")
        return graph.replay

    def in_order(self, blocks: Sequence[tuple[str, Shape]]) -> Iterable[tuple[int, Any]]:
        """The largest first: symmetric memory that a graph has seen is never freed, so it had better not grow."""
        return sorted(enumerate(blocks), key=lambda block: -block[1][1].output_bytes)

    def begin(self, link: str, shape: Shape) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        self._link = link
        self._candidates = []
        ctas: int | None = None
        for backend in backends(self.settings):
            if reason := self._why_not(backend):
                self.leave_out(backend, reason)
                continue
            if backend not in USES_LIBRARY:
                self._candidates.append(Candidate(backend, self._groups[link]))
                continue
            ctas = self._best_ctas(shape) if ctas is None else ctas
            group = self._group_of_auto(ctas) if backend == "auto" else self._communicators[ctas]
            self._candidates.append(Candidate(backend, group, ctas))

    def _why_not(self, backend: str) -> str | None:
        """What keeps a column from being measured over this link, in a line."""
        of_torch = backend in torch_symmetric.COLUMNS
        if not of_torch and not exists("cuda" if backend == "auto" else backend, self.settings.op):
            return f"it has no {self.settings.op}" if backend != "auto" else f"cuda has no {self.settings.op}"
        if self._link == "pinned" and of_torch:
            return "torch's symmetric memory is peer memory"
        if self._link == "pinned" and backend in USES_LIBRARY:
            return "NCCL cannot be made to go through pinned host memory"
        if backend in USES_LIBRARY and not self._communicators:
            return f"none of nccl_max_ctas={self.settings.nccl_max_ctas} fits the card"
        return None

    def _group_of_auto(self, ctas: int) -> dist.ProcessGroup:
        """Over this link where it is fused, over a communicator of so many CTAs where it is not."""
        key = (self._link, ctas)
        if key not in self._groups_of_auto:
            self._groups_of_auto[key] = nccl_groups.make(ctas, self.settings.timeout_s)
            fused_ops.set_link(self._link, self._groups_of_auto[key])
        return self._groups_of_auto[key]

    def candidates(self, shape: Shape) -> list[Candidate]:
        return self._candidates

    def _best_ctas(self, shape: Shape) -> int:
        """Of the communicator on which that shape's exchange is fastest."""
        exchange = operators.load(self.settings.op).exchange
        tried = [
            Variant("baseline", "exchange_alone", exchange(self, shape, group), ctas, NCCL_INPUTS)
            for ctas, group in self._communicators.items()
        ]
        timings = self.timer.measure(tried, most_rounds=NCCL_ROUNDS)
        best = min(timings, key=lambda timing: timing.ms).nccl_max_ctas
        assert best is not None
        return best

    def rotations(self, touched_bytes: int) -> int:
        """So many that a rotation of all the card's ranks fills its L2 cache twice, as far as MOST_INPUTS does."""
        touched = touched_bytes * self.settings.ranks_per_gpu
        return inputs_beyond(self._properties.L2_cache_size, touched, self.settings.rotate)

    def tables(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """A view of the one block: whoever asks next gets the same memory."""
        return self._table_memory[: elements * dtype.itemsize].view(dtype).normal_()

    def leave_out(self, backend: str, reason: str) -> None:
        if (backend, reason) not in self._said:
            self._said.add((backend, reason))
            self._tell(("note", f"no rows of {backend}: {reason}"))

    def measure(self, variants: Sequence[Variant]) -> list[Timing]:
        rehearsal = Rehearsal(variants)
        for backend, phase, problem in rehearsal.problems:
            self.leave_out(f"{backend} {phase}", problem)
        timings = self.timer.measure(rehearsal.able)
        fused_ops.check_errors()
        return timings

    def limit(self, shape: Shape, timings: Sequence[Timing]) -> limits.Limit:
        traffic = shape.traffic(self.world).share(self.world // self.settings.ranks_per_gpu)  # of one card
        compute = min((t.ms for t in timings if t.phase == "compute_alone"), default=None)
        link = self._label()
        if link == gpu_links.SAME_GPU:
            return limits.of_shared_memory(traffic, self._rates.of_memory(shape))
        if link == gpu_links.PCIE_HOST:
            return limits.of_host_link(traffic, self._rates.of_host_link(), compute, shape.compute)
        exchanges = [t.ms for t in timings if t.phase == "exchange_alone"]
        exchange = min(exchanges or (t.ms for t in timings if t.phase == "forward"))
        return limits.of_own_link(compute, exchange, shape.compute)

    def _label(self) -> str:
        return gpu_links.label(self._groups[self._link])

    def facts(self) -> dict[str, Any]:
        version = nccl.loaded_version()
        return {
            "link": self._label(),
            "gpu": self._properties.name,
            "ranks_per_gpu": self.settings.ranks_per_gpu,
            "cuda": torch.version.cuda,
            "nccl": None if version is None else ".".join(map(str, version)),
            "graph": self.settings.graph,
        }

    def close(self) -> None:
        del self.timer
        gc.collect()
        torch.cuda.synchronize()
        dist.barrier()


def make(settings: BenchSettings, rank: int, address: str, tell: Callable[[tuple[str, Any]], None]) -> CudaSession:
    return CudaSession(settings, rank, address, tell)
