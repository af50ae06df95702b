"""First weights, states, dtypes, groups and refusals of the split model."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from models.parallel.shards import full_shapes, load_full, parameter_shards
from models.parallel.tensor_parallel import TensorParallel
from models.transformer.config import TransformerConfig
from models.transformer.model import Transformer
from tests.models.close import assert_close
from tests.models.transformer.parity import check_gradients, gradients, split, unsplit
from tests.models.transformer.small import GPT2, LLAMA, STYLES, batch, packed
from tests.ranks import run_ranks


@pytest.mark.parametrize("style", STYLES)
def test_packed_documents_are_as_if_each_were_alone(style):
    model = unsplit(STYLES[style])
    tokens, targets = batch(STYLES[style], 2, 11)
    positions, documents = packed(2, 11)
    together = model(tokens, targets, positions=positions, documents=documents)
    for document in range(2):
        own = documents[0] == document
        assert_close(together[:, own], model(tokens[:, own], targets[:, own]), f"document {document}", 1e-12)
    assert float((together - model(tokens, targets)).detach().abs().max()) > 1e-3


def gradient_through_logits():
    tp = TensorParallel(dist.group.WORLD)
    reference = unsplit(LLAMA)
    model = split(reference, tp)
    tokens, _ = batch(LLAMA, 2, 5)
    factor = torch.randn(2, LLAMA.vocabulary, generator=torch.Generator().manual_seed(0))
    at = torch.tensor([4, 2])
    wanted = gradients(reference, reference.logits(tokens, at=at) * factor)
    (model.logits(tokens, at=at) * factor).sum().backward()
    check_gradients(model, wanted)


def test_logits_have_gradients_too():
    run_ranks(2, gradient_through_logits)


def initialised():
    tp = TensorParallel(dist.group.WORLD)
    for config in STYLES.values():
        reference, model = Transformer(config), Transformer(config, tp)
        reference.initialize(5)
        model.initialize(5)
        shards = parameter_shards(model)
        whole = dict(reference.named_parameters())
        assert list(whole) == [name for name, _ in model.named_parameters()]
        assert full_shapes(reference) == full_shapes(model)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, shards[name].of(whole[name]) if name in shards else whole[name]), name
            assert (name not in shards) == ("norm" in name or "positions" in name or name.endswith(ROW_BIASES)), name


ROW_BIASES = ("out.bias", "down.bias")


@pytest.mark.parametrize("world", [2, 3])
def test_first_weights_names_and_whole_shapes_do_not_depend_on_the_split(world):
    run_ranks(world, initialised)


def own_part(config: TransformerConfig) -> tuple[dict[str, Tensor], dict, list[Tensor]]:
    model = Transformer(config, TensorParallel(dist.group.WORLD))
    model.initialize(2)
    tokens, targets = batch(config, 2, 6)
    with torch.no_grad():
        return model.state_dict(), parameter_shards(model), model(tokens, targets)


def from_full(config: TransformerConfig, full: dict[str, Tensor]) -> Tensor:
    model = Transformer(config, TensorParallel(dist.group.WORLD))
    load_full(model, full)
    with torch.no_grad():
        return model(*batch(config, 2, 6))


@pytest.mark.parametrize("style", STYLES)
def test_states_of_two_ranks_join_and_split_over_one_and_four(style):
    config = STYLES[style]
    ranks = run_ranks(2, own_part, config)
    shards = [shard for _, shard, _ in ranks]
    full = {
        name: torch.cat([state[name] for state, _, _ in ranks], shards[0][name].dim) if name in shards[0] else value
        for name, value in ranks[0][0].items()
    }
    for world in (1, 4):
        for losses in run_ranks(world, from_full, config, full):
            assert_close(losses, ranks[0][2], f"losses on {world} ranks")


def one_step_of_bf16():
    model = Transformer(LLAMA, TensorParallel(dist.group.WORLD, sequence_parallel=True), checkpoint_activations=True)
    reference = unsplit(LLAMA)
    load_full(model, {name: p.detach() for name, p in reference.named_parameters()})
    tokens, targets = batch(LLAMA, 3, 7)
    with torch.autocast("cpu", torch.bfloat16):
        losses = model(tokens, targets)
    assert losses.dtype == torch.float32
    assert_close(losses, reference(tokens, targets), "losses under autocast", tolerance=3e-2)
    losses.mean().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())
    whole = copy.deepcopy(model).bfloat16()
    losses = whole(tokens, targets)
    assert_close(losses, reference(tokens, targets), "losses of bf16 weights", tolerance=6e-2)
    losses.mean().backward()
    assert all(p.grad.dtype == torch.bfloat16 for p in whole.parameters())


def test_autocast_and_bf16_weights():
    run_ranks(2, one_step_of_bf16)


def two_by_two():
    """Data parallel x tensor parallel, with DDP's own collectives over the other pairs."""
    rank = dist.get_rank()
    tensor_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    data_groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    reference = unsplit(GPT2)
    tp = TensorParallel(tensor_groups[rank // 2], sequence_parallel=True)
    model = split(reference, tp)
    trained = torch.nn.parallel.DistributedDataParallel(model, process_group=data_groups[rank % 2])
    tokens, targets = batch(GPT2, 4, 7)
    mine = slice(rank // 2 * 2, rank // 2 * 2 + 2)
    wanted = gradients(reference, reference(tokens, targets) / 2)
    trained(tokens[mine], targets[mine]).sum().backward()
    check_gradients(model, wanted)


def test_data_parallel_times_tensor_parallel():
    run_ranks(4, two_by_two)


def refusals():
    tp = TensorParallel(dist.group.WORLD)
    with pytest.raises(ValueError, match="1 KV heads cannot be split over 2 ranks"):
        Transformer(replace(LLAMA, kv_heads=1), tp)
    model = Transformer(GPT2, tp)
    model.initialize(0)
    tokens, targets = batch(GPT2, 2, 5)
    cases = {
        r"tokens must be \[batch, length\] int64": lambda: model(tokens.int(), targets),
        r"targets must be \[2, 5\] as the tokens are, got \[2, 4\]": lambda: model(tokens, targets[:, :4]),
        r"documents must be \[2, 5\]": lambda: model(tokens, targets, documents=tokens[0]),
        r"token 41 is outside": lambda: model(tokens + 41 - tokens, targets),
        r"target 41 is outside": lambda: model(tokens, targets * 0 + 41),
        r"position 32 is outside": lambda: model(tokens, targets, positions=tokens * 0 + 32),
        r"33 tokens, and the model has 32 learned positions": lambda: model(*batch(GPT2, 1, 33)),
        r"at must name one token a sequence, \[2\]": lambda: model.logits(tokens, at=torch.tensor([1])),
    }
    for words, call in cases.items():
        with pytest.raises(ValueError, match=words):
            call()
    model(tokens, targets).sum().backward()  # the ranks still agree on what comes next


def test_bad_input_is_one_clear_error():
    run_ranks(2, refusals)


def test_only_members_of_the_group_hold_a_part():
    run_ranks(3, outsiders)


def outsiders():
    group = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        with pytest.raises(ValueError, match="not a member"):
            TensorParallel(group)
    else:
        assert TensorParallel(group).world == 2
