"""The baseline's CPU kernels: tables and states wherever a caller may have put them."""

import pytest
import torch

from fused_ops.backends.baseline import embedding_fbgemm, embedding_torch
from fused_ops.backends.baseline.embedding_values import Lookups
from fused_ops.embedding_inputs import EmbeddingInputs, OptimizerInputs
from fused_ops.embedding_layout import EmbeddingLayout


def together(tensors: list[torch.Tensor], front: int = 0) -> list[torch.Tensor]:
    """Copies in one storage, as TorchRec allocates them, `front` elements into it."""
    storage = torch.cat([torch.zeros(front, dtype=tensors[0].dtype), *(t.reshape(-1) for t in tensors)])
    parts = storage[front:].split([t.numel() for t in tensors])
    return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]


def apart(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t.clone() for t in tensors]


PLACED = {"apart": apart, "together": together, "together, further on": lambda tensors: together(tensors, 3)}


@pytest.mark.parametrize("optimizer", ["adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize("states", PLACED)
@pytest.mark.parametrize("tables", PLACED)
def test_update_finds_tables_and_states_wherever_they_lie(tables, states, optimizer):
    pytest.importorskip("fbgemm_gpu")
    dims, batch = [4, 8, 12], 6
    layout = EmbeddingLayout.table_wise([dims], [batch])
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(5, dim, generator=generator) for dim in dims]
    rates = [torch.rand(w.shape if optimizer == "adagrad" else w.shape[:1], generator=generator) + 0.1 for w in weights]
    grad = torch.randn(batch, sum(dims), generator=generator)
    indices = torch.randint(0, 5, (len(dims) * batch,), generator=generator)
    results = []
    for kernels, place_tables, place_states in (
        (embedding_fbgemm, PLACED[tables], PLACED[states]),
        (embedding_torch, apart, apart),
    ):
        inputs = EmbeddingInputs(
            place_tables(weights),
            indices,
            torch.arange(len(indices) + 1),
            None,
            None,
            layout.encoded,
            layout.dtype,
            "sum",
            "error",
            0,
            1,
        )
        update = OptimizerInputs(optimizer, place_states(rates), torch.tensor([0.1]), [1e-6])
        lookups = Lookups(inputs)
        if kernels is embedding_fbgemm:
            assert embedding_fbgemm.why_not(lookups, optimizer) is None
        kernels.update(lookups, grad, update)
        results.append([*inputs.tables, *update.states])
    torch.testing.assert_close(results[0], results[1])
