"""The split model equals the unsplit one in float64: losses, logits and every gradient."""

from dataclasses import replace

import pytest
import torch.distributed as dist

from models.parallel.tensor_parallel import TensorParallel
from tests.models.close import assert_close, assert_same_on_all_ranks
from tests.models.transformer.parity import check_gradients, gradients, split, unsplit
from tests.models.transformer.small import STYLES, batch, packed
from tests.ranks import run_ranks

SHAPES = ((3, 8), (3, 7), (1, 1), (0, 5))  # samples, length; 21, 1 and 0 tokens do not divide by the ranks


def every_style(sequence_parallel: bool, comm: str) -> None:
    tp = TensorParallel(dist.group.WORLD, comm=comm, sequence_parallel=sequence_parallel)
    again = replace(tp, save_gathered=False)
    for config in STYLES.values():
        reference = unsplit(config)
        models = [split(reference, tp), split(reference, again, checkpoint_activations=True)]
        for samples, length in SHAPES:
            tokens, targets = batch(config, samples, length)
            positions, documents = packed(samples, length)
            packing = {"positions": positions, "documents": documents}
            for extra in ({}, packing) if length == 7 else ({},):
                want = reference(tokens, targets, **extra)
                wanted = gradients(reference, want)
                for model in models:
                    model.zero_grad()
                    got = model(tokens, targets, **extra)
                    assert_close(got, want, "losses")
                    assert_same_on_all_ranks(got.detach(), "losses")
                    got.sum().backward()
                    check_gradients(model, wanted)
                assert_close(models[0].logits(tokens, **extra), reference.logits(tokens, **extra), "logits")


@pytest.mark.parametrize(
    ("world", "sequence_parallel", "comm"),
    [(2, False, "fused"), (2, True, "fused"), (4, False, "fused"), (4, True, "fused"), (2, True, "baseline")],
)
def test_losses_logits_and_gradients_equal_the_unsplit_model(world, sequence_parallel, comm):
    run_ranks(world, every_style, sequence_parallel, comm)
