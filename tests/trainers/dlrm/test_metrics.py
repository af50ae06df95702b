import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score

from tests.ranks import run_ranks
from trainers.dlrm.metrics import evaluate, gather


def _samples(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, generator=generator).round(decimals=1)  # ties
    labels = (torch.rand(n, generator=generator) < (logits - 1).sigmoid()).float()
    return logits, labels


def test_equals_sklearn():
    logits, labels = _samples(5000)
    result = evaluate(logits, labels)
    probabilities = logits.double().sigmoid().numpy()
    assert result.auc == pytest.approx(roc_auc_score(labels.numpy(), probabilities), abs=1e-6)
    assert result.loss == pytest.approx(log_loss(labels.numpy(), probabilities), rel=1e-9)
    prior = labels.mean().item()
    assert result.ne == pytest.approx(result.loss / log_loss(labels.numpy(), [prior] * 5000), rel=1e-6)
    assert result.samples == 5000
    assert result.warnings == []


def test_large_logits_keep_their_order():
    result = evaluate(torch.tensor([20.0, 25.0, 30.0, 18.0]), torch.tensor([0.0, 1.0, 1.0, 0.0]))
    assert result.auc == 1.0


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_one_class_has_no_auc(label):
    result = evaluate(torch.randn(8), torch.full((8,), label))
    assert (result.auc, result.ne) == (None, None)
    assert result.loss is not None
    assert f"every label of the evaluation is {int(label)}" in result.warnings[0]


def test_an_auc_of_a_half_is_flagged():
    result = evaluate(torch.zeros(100), torch.arange(100) % 2)
    assert result.auc == 0.5
    assert "no better than chance" in result.warnings[0]


def test_no_samples_and_no_finite_predictions():
    assert evaluate(torch.zeros(0), torch.zeros(0)).warnings == ["the evaluation split has no samples"]
    broken = evaluate(torch.tensor([0.0, float("nan")]), torch.tensor([0.0, 1.0]))
    assert broken.auc is None
    assert broken.warnings == ["predictions are not finite"]


def _gather(counts):
    import torch.distributed as dist

    rank = dist.get_rank()
    values = torch.arange(counts[rank], dtype=torch.float32) + 100 * rank
    gathered = gather(values)
    return None if gathered is None else gathered.tolist()


def test_gathers_uneven_ranks_on_rank_0():
    results = run_ranks(3, _gather, [2, 0, 3])
    assert results == [[0.0, 1.0, 200.0, 201.0, 202.0], None, None]


def test_gathers_nothing():
    assert run_ranks(2, _gather, [0, 0]) == [[], None]
