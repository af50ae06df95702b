"""Calls of a variant as one CUDA graph, so that no interpreter and no launch is timed with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def capture(run: Callable[[int], Any], calls: int, stream: torch.cuda.Stream, pool: Any) -> torch.cuda.CUDAGraph | str:
    """`run(0)` to `run(calls - 1)`, one after the other; or, in a line, why they cannot be captured.

    `run` has been called before, on that stream: nothing is compiled, loaded or set up in here. Graphs of one `pool` share
    memory: they are not replayed at the same time.
    """
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # Other threads (NCCL's watchdog) may call CUDA meanwhile.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        problem = ""
        try:
            for i in range(calls):
                run(i)
        except Exception as error:
            problem = _in_one_line(error)
        try:
            graph.capture_end()
        except RuntimeError as error:
            problem = problem or _in_one_line(error)
    torch.cuda.current_stream().wait_stream(stream)
    return problem or graph


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
