"""One process's losses, whatever the engine, the split and `comm`."""

import math

import pytest
import torch

from tests.ranks import RankError, run_ranks
from tests.trainers.transformer import small

LLAMA = {
    "activation": "swiglu",
    "norm": "rmsnorm",
    "positions": "rope",
    "kv_heads": 2,
    "bias": False,
    "tied_output": False,
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return small.make_text(tmp_path_factory.mktemp("text"))


def _relative(a, b):
    assert len(a) == len(b)
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def _expected(config):
    return small.losses(run_ranks(1, small.train, config)[0])


def test_two_ranks_train_as_one_does(text, tmp_path):
    """Tensor parallel, sequence parallel (27 rows over 2 ranks), replicas, ZeRO: under either comm, in every style."""
    odd = {"batch_size": 5}
    splits = [
        ("baseline", {}, {}),
        ("fused", {}, {}),
        ("fused", {"sequence_parallel": True}, {}),
        ("baseline", {"sequence_parallel": True, "save_gathered": False}, {}),
        ("fused", {"checkpoint_activations": True, "sequence_parallel": True, "save_gathered": False}, {}),
        ("fused", {"tensor_parallel": 1}, odd),
        ("fused", {"kind": "deepspeed", "tensor_parallel": 1}, odd),
        ("fused", {"kind": "deepspeed", "tensor_parallel": 1, "zero_stage": 2}, odd),
        ("fused", {"kind": "deepspeed"}, {}),
    ]
    for style in ({}, LLAMA):
        configs = [
            small.config(tmp_path, text, comm, engine=engine, data=data, model=style) for comm, engine, data in splits
        ]
        expected = {
            size: _expected(small.config(tmp_path, text, data={"batch_size": size}, model=style)) for size in (5, 6)
        }
        for config, records in zip(configs, run_ranks(2, small.train_all, configs, timeout=200)[0], strict=True):
            assert _relative(small.losses(records), expected[config.data.batch_size]) < 2e-5, config.engine
        assert expected[6][-2] < 0.8 * expected[6][0], "nothing was learned"


def test_replicas_of_split_models(text, tmp_path):
    """DP x TP = 2 x 2, under DDP and ZeRO, with sequence parallelism and without."""
    engines = [{}, {"sequence_parallel": True}, {"kind": "deepspeed"}, {"kind": "deepspeed", "sequence_parallel": True}]
    configs = [
        small.config(tmp_path, text, "fused", engine={"tensor_parallel": 2, **engine}, model=LLAMA)
        for engine in engines
    ]
    expected = _expected(small.config(tmp_path, text, model=LLAMA))
    results = run_ranks(4, small.train_all, configs, timeout=250)
    for i, config in enumerate(configs):
        assert _relative(small.losses(results[0][i]), expected) < 2e-5, config.engine
        assert all(small.losses(rank[i]) == small.losses(results[0][i]) for rank in results), "ranks disagree"


def test_accumulated_batches_are_one_large_one(text, tmp_path):
    optim = {"accumulate": 3}
    whole = _expected(small.config(tmp_path, text, trainer={"steps": 4}))
    parts = [
        small.config(tmp_path, text, "fused", data={"batch_size": 2}, optim=optim, trainer={"steps": 4}, engine=engine)
        for engine in ({}, {"tensor_parallel": 1}, {"kind": "deepspeed", "tensor_parallel": 1})
    ]
    for config, records in zip(parts, run_ranks(2, small.train_all, parts, timeout=120)[0], strict=True):
        assert _relative(small.losses(records), whole) < 2e-5, config.engine


def test_bf16_stays_close(text, tmp_path):
    trainer = {"dense_dtype": "bf16"}
    configs = [
        small.config(tmp_path, text, comm, trainer=trainer, engine=engine)
        for comm, engine in (
            ("baseline", {}),
            ("fused", {"sequence_parallel": True}),
            ("fused", {"kind": "deepspeed", "tensor_parallel": 1}),
        )
    ]
    expected = _expected(small.config(tmp_path, text))
    for records in run_ranks(2, small.train_all, configs, timeout=120)[0]:
        assert _relative(small.losses(records), expected) < 2e-2


def test_a_compiled_model_trains_alike(text, tmp_path):
    trainer, model = {"compile": True, "compile_backend": "aot_eager", "steps": 4}, {"layers": 1}
    configs = [
        small.config(tmp_path, text, "fused", trainer=trainer, engine=engine, model=model)
        for engine in ({}, {"sequence_parallel": True})
    ]
    expected = _expected(small.config(tmp_path, text, trainer={"steps": 4}, model=model))
    for config, records in zip(configs, run_ranks(2, small.train_all, configs, timeout=250)[0], strict=True):
        assert _relative(small.losses(records), expected) < 2e-5, config.engine


def test_the_evaluation_is_exact_and_counts_every_token(text, tmp_path):
    config = small.config(tmp_path, text, trainer={"steps": 1}, data={"eval_batch_size": 5})
    for world, engine in ((1, {}), (2, {}), (2, {"tensor_parallel": 1})):
        config = small.config(tmp_path, text, "fused", trainer={"steps": 1}, data={"eval_batch_size": 5}, engine=engine)
        event = run_ranks(world, small.train, config)[0][-1]
        from trainers.data.text.build import open_text

        assert event["tokens"] == open_text(text).split_tokens()["val"]
        assert event["perplexity"] == pytest.approx(math.exp(event["loss"]))


def _with_a_nan(config):
    from trainers.families import make_engine
    from trainers.loop import NonFiniteLossError

    engine = make_engine(config)
    with torch.no_grad():
        next(iter(engine.model.parameters()))[:] = math.nan
    from tests.trainers import tiny
    from trainers.checkpoint import Progress
    from trainers.transformer.batches import build_batches

    def batches(data, model, split, rank, world, start):
        return iter(build_batches(data, model, split, engine.replica.rank, engine.replica.count, start))

    try:
        tiny.run_loop(config, engine, Progress(), batches)
    except NonFiniteLossError as error:
        return str(error)
    return "trained"


def test_a_loss_that_is_not_finite_stops_every_rank(text, tmp_path):
    for message in run_ranks(2, _with_a_nan, small.config(tmp_path, text, "fused")):
        assert "step 1: the loss is not finite on rank 0" in message
    saved = torch.load(tmp_path / "nonfinite_step1_rank0.pt", weights_only=True)
    assert saved["tokens"].shape == (6, small.LENGTH)


def test_ranks_that_make_no_replicas_are_an_error(text, tmp_path):
    with pytest.raises(RankError, match=r"engine.tensor_parallel=2 does not divide 3 ranks"):
        run_ranks(3, small.train, small.config(tmp_path, text, engine={"tensor_parallel": 2}))
