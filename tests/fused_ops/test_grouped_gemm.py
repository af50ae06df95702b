"""Products of rows by expert and gradients of the weights, against float64, with torch's grouped kernel and without."""

import pytest
import torch

from fused_ops import grouped_gemm
from fused_ops.grouped_gemm import grouped_linear, grouped_weight_gradient
from tests.fused_ops.moe_reference import assert_rounded

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS = ([3, 0, 5, 1], [0, 0, 0, 9], [0, 0, 0, 0], [40, 7, 0, 0])


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_and_gradients(dtype, kernel, monkeypatch):
    if kernel:
        # CPUs have the function too: what is checked is how it is called, and what becomes of experts without rows.
        monkeypatch.setattr(grouped_gemm, "_has_kernel", lambda input, columns: input.numel() > 0)
    generator = torch.Generator().manual_seed(1)
    for rows in ROWS:
        total, ends = sum(rows), torch.tensor(rows).cumsum(0).tolist()
        input = torch.randn(total, 24, generator=generator).to(dtype)
        grad = torch.randn(total, 16, generator=generator).to(dtype)
        weights = torch.randn(4, 16, 24, generator=generator).to(dtype)
        received = torch.tensor([[count // 2, count - count // 2] for count in rows])
        strided = {
            "contiguous": weights,
            "transposed": weights.transpose(1, 2).contiguous().transpose(1, 2),
            "expanded": weights[:1].expand(4, 16, 24),
            "offset": torch.cat([weights.flatten()[:1], weights.flatten()])[1:].view(4, 16, 24),
        }
        gradient = grouped_weight_gradient(grad, input, received)
        for weight in strided.values():
            output = grouped_linear(input, weight, rows)
            for expert, (count, end) in enumerate(zip(rows, ends, strict=True)):
                part = slice(end - count, end)
                assert_rounded(output[part], input[part].double() @ weight[expert].double().t(), 24)
                assert_rounded(gradient[expert], grad[part].double().t() @ input[part].double(), count)
