"""A Transformer's checkpoints: resumed to the bit, at other numbers of ranks, under the other engine and the other comm."""

import pytest

from tests.ranks import run_ranks
from tests.trainers import tiny
from tests.trainers.transformer import small
from trainers import checkpoint
from trainers.checkpoint import Progress


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return small.make_text(tmp_path_factory.mktemp("text"))


def _go_on(config, path):
    """Records from the checkpoint on."""
    from trainers.families import make_engine
    from trainers.transformer.batches import build_batches

    engine = make_engine(config)
    progress, _ = checkpoint.load(config, engine, path)

    def batches(data, model, split, rank, world, start):
        return iter(build_batches(data, model, split, engine.replica.rank, engine.replica.count, start))

    records = tiny.run_loop(config, engine, progress, batches)
    engine.close()
    return small.losses(records)


def _go_on_all(configs, path):
    return [_go_on(config, path) for config in configs]


def _stopped(text, path, comm="fused", engine=None, **groups):
    """Trained 6 of 10 steps and saved; the losses of the whole run, and how it goes on."""
    trainer = {"steps": 10}
    whole = small.config(path / "whole", text, comm, engine=engine or {}, trainer=trainer, **groups)
    half = small.config(
        path / "half", text, comm, engine=engine or {}, trainer={"steps": 6, "checkpoint_every": 6}, **groups
    )
    # The decay goes to the end of training, which is the same in both.
    for config in (whole, half):
        config.optim.decay_steps = 7
    return whole, half


def _train_both(configs):
    return [small.losses(small.train(config)) for config in configs]


@pytest.mark.parametrize("engine", [{}, {"kind": "deepspeed", "tensor_parallel": 1}], ids=["ddp", "deepspeed"])
def test_a_resumed_run_is_the_same_to_the_bit(engine, text, tmp_path):
    whole, half = _stopped(text, tmp_path, engine=engine)
    straight, _ = run_ranks(2, _train_both, [whole, half])[0]
    resumed = run_ranks(2, _go_on, whole, checkpoint.newest(tmp_path / "half"))[0]
    assert resumed == straight[6:]


def test_checkpoints_load_at_other_sizes_engines_and_comms(text, tmp_path):
    """TP=2 to TP=1 and 4, to DP x TP, to ZeRO, and from ZeRO back; GQA with two KV heads stays at two ranks at most."""
    whole, half = _stopped(text, tmp_path)
    straight = run_ranks(2, _train_both, [whole, half])[0][0]
    path = checkpoint.newest(tmp_path / "half")
    for world, engines in (
        (1, [{}]),
        (2, [{"tensor_parallel": 1}, {"kind": "deepspeed", "tensor_parallel": 1, "zero_stage": 2}]),
        (4, [{}, {"tensor_parallel": 2, "sequence_parallel": True}, {"kind": "deepspeed", "tensor_parallel": 2}]),
    ):
        configs = [_stopped(text, tmp_path / str(world), comm="baseline", engine=engine)[0] for engine in engines]
        for engine, resumed in zip(engines, run_ranks(world, _go_on_all, configs, path, timeout=120)[0], strict=True):
            assert resumed == pytest.approx(straight[6:], rel=2e-5), (world, engine)

    saved_by_zero = _stopped(text, tmp_path / "zero", engine={"kind": "deepspeed", "tensor_parallel": 1})[1]
    run_ranks(2, small.train, saved_by_zero)
    resumed = run_ranks(2, _go_on, whole, checkpoint.newest(tmp_path / "zero" / "half"))[0]
    assert resumed == pytest.approx(straight[6:], rel=2e-5)


def _load_other(config, path):
    from trainers.families import make_engine

    try:
        checkpoint.load(config, make_engine(config), path)
    except checkpoint.CheckpointError as error:
        return str(error)
    return "loaded"


def test_another_model_is_refused(text, tmp_path):
    _, half = _stopped(text, tmp_path)
    run_ranks(2, small.train, half, Progress())
    other = small.config(tmp_path, text, model={"layers": 3, "activation": "swiglu"})
    message = run_ranks(2, _load_other, other, checkpoint.newest(tmp_path / "half"))[0]
    assert "model.activation: gelu -> swiglu; model.layers: 2 -> 3" in message
