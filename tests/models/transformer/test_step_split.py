"""The parts of a decode step's time add up to it."""

import pytest
import torch.distributed as dist

from models.parallel.tensor_parallel import TensorParallel
from models.transformer.model import Transformer
from models.transformer.step_split import StepSplit, kernel_kind, split_step, steps_that_fit
from tests.models.transformer.small import GPT2, LLAMA
from tests.ranks import run_ranks


def split_of(comm: str) -> StepSplit:
    model = Transformer(GPT2, TensorParallel(dist.group.WORLD if dist.is_initialized() else None, comm=comm))
    model.initialize(0)
    return split_step(model, [[1, 2], [3]], steps=6)


def check(split: StepSplit) -> None:
    assert split.steps == 6
    assert 0 < split.gemv_ms < split.step_ms
    assert 0 < split.rest_ms < split.step_ms
    assert split.gemv_ms + split.communication_ms + split.rest_ms == pytest.approx(split.step_ms)


@pytest.mark.parametrize("comm", ["fused", "baseline"])
def test_two_ranks_communicate(comm):
    for split in run_ranks(2, split_of, comm):
        check(split)
        assert split.communication_ms > 0


def test_one_rank_does_not():
    split = split_of("fused")
    check(split)
    assert split.communication_ms == 0


def test_parts_that_come_to_more_than_the_step_leave_no_negative_rest():
    assert StepSplit.of(step=4.0, gemv=3.0, communication=1.5, steps=2) == StepSplit(2.0, 1.5, 0.75, 0.0, 2)


def test_bad_input():
    with pytest.raises(ValueError, match="steps is 0"):
        split_step(Transformer(GPT2), [[1]], steps=0)


def test_as_many_steps_as_positions():
    model = Transformer(GPT2)
    model.initialize(0)
    assert steps_that_fit(model, [[1], [1] * 25]) == 5
    assert split_step(model, [[1], [1] * 25], steps=5).steps == 5
    with pytest.raises(ValueError, match="need 33 positions, and the model has 32 learned ones"):
        split_step(model, [[1], [1] * 25], steps=6)
    assert steps_that_fit(model, [[1] * 31]) == 0
    assert steps_that_fit(Transformer(LLAMA), [[1] * 31]) is None


def test_a_model_is_as_it_was_after_its_products_were_timed():
    model = Transformer(GPT2)
    model.initialize(0)
    split_step(model, [[1]], steps=2)
    assert "_local_logits" not in vars(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_64x8_64x16_1x2_h_bz_splitK_TNT", "gemv"),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16, float>", "gemv"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64", "gemv"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm>", "gemv"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "gemv"),
        ("void fused_ops::gemm_all_reduce_kernel<__nv_bfloat16>", "gemv"),
        ("partial_sums_kernel", "gemv"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("ncclDevKernel_AllGather_RING_LL", "communication"),
        ("void one_shot_all_reduce_kernel<c10::BFloat16, 16>", "communication"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel)", "rest"),
        ("void pytorch_flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits>", "rest"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "rest"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "rest"),
        ("Memcpy DtoD (Device -> Device)", "rest"),
    ],
)
def test_kernels_by_name(name, kind):
    assert kernel_kind(name) == kind
