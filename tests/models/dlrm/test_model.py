import pytest
import torch

from models.dlrm.model import build_dlrm, dense_parameter_count, table_parameter_count
from tests.models.dlrm.plain import TABLES, PlainDLRM
from tests.trainers import tiny


def _unsharded(config):
    torch.manual_seed(config.trainer.seed)
    return build_dlrm(config.model, tables_device="cpu")


@pytest.mark.parametrize("interaction", ["dot", "dcnv2"])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_equals_plain_torch(interaction, pooling, tmp_path):
    config = tiny.config(tmp_path, model={"interaction": interaction, "pooling": pooling, "dcn_low_rank": 4})
    model, plain = _unsharded(config), PlainDLRM(config)
    for t, table in enumerate(plain.tables):
        model.state_dict()[f"{TABLES}.table_{t}.weight"].copy_(table.weight.detach())
    batch = tiny.global_batch(config.model, 0, 16)
    torch.testing.assert_close(model(batch.dense, batch.sparse), plain(batch), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("interaction", ["dot", "dcnv2"])
def test_no_samples_give_zero_gradients(interaction, tmp_path):
    """The embeddings aside: TorchRec's unsharded collection takes no empty batch."""
    model = _unsharded(tiny.config(tmp_path, model={"interaction": interaction, "dcn_low_rank": 4}))
    dense = model.dense_arch(torch.zeros(0, tiny.NUM_DENSE))
    logits = model.over_arch(model.inter_arch(dense_features=dense, sparse_features=torch.zeros(0, 5, 16)))
    assert logits.shape == (0, 1)
    logits.sum().backward()
    dense_parameters = [p for name, p in model.named_parameters() if "embedding_bags" not in name]
    assert all(p.grad is not None and not p.grad.any() for p in dense_parameters)


def test_parameter_counts(tmp_path):
    config = tiny.config(tmp_path).model
    model = build_dlrm(config, tables_device="cpu")
    assert dense_parameter_count(config) + table_parameter_count(config) == sum(p.numel() for p in model.parameters())


def test_an_unknown_interaction_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"model.interaction is 'cross'; allowed: dot, dcnv2"):
        build_dlrm(tiny.config(tmp_path, model={"interaction": "cross"}).model)
