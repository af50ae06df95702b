"""Collectives fused into the kernels that feed them, as differentiable PyTorch operators.

Import this package alone: it needs torch and nothing else of this project. docs/architecture.md states the contracts.
"""

from fused_ops.all_gather_gemm import all_gather_gemm
from fused_ops.all_to_all import all_to_all
from fused_ops.all_to_all_gemm import all_to_all_gemm
from fused_ops.counters import counters, reset_counters
from fused_ops.embedding_all_to_all import embedding_all_to_all
from fused_ops.embedding_layout import EmbeddingLayout
from fused_ops.embedding_optimizer import FusedOptimizer
from fused_ops.errors import (
    BackendUnavailableError,
    CommunicationError,
    PeerAbortedError,
    PeerLostError,
    PeerTimeoutError,
)
from fused_ops.exposed import exposed_wait_ms
from fused_ops.gemm_all_reduce import gemm_all_reduce
from fused_ops.gemm_all_to_all import gemm_all_to_all
from fused_ops.gemm_reduce_scatter import gemm_reduce_scatter
from fused_ops.launch_geometry import set_num_sms
from fused_ops.symmetric.cuda_channel import set_checking
from fused_ops.symmetric.group import check_errors, memory_report, set_link, set_timeout

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailableError",
    "CommunicationError",
    "EmbeddingLayout",
    "FusedOptimizer",
    "PeerAbortedError",
    "PeerLostError",
    "PeerTimeoutError",
    "all_gather_gemm",
    "all_to_all",
    "all_to_all_gemm",
    "check_errors",
    "counters",
    "embedding_all_to_all",
    "exposed_wait_ms",
    "gemm_all_reduce",
    "gemm_all_to_all",
    "gemm_reduce_scatter",
    "memory_report",
    "reset_counters",
    "set_checking",
    "set_link",
    "set_num_sms",
    "set_timeout",
]
