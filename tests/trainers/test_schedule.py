import pytest

from trainers.config import OptimConfig
from trainers.schedule import learning_rate_factor


def _factors(steps, **optim):
    return [learning_rate_factor(OptimConfig(**optim), step, steps) for step in range(steps)]


def test_constant_unless_asked():
    assert _factors(5) == [1.0] * 5


def test_warms_up_linearly():
    assert _factors(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_decays_quadratically_to_zero():
    assert _factors(8, decay_start=2, decay_steps=4) == [1.0, 1.0, 1.0, 0.5625, 0.25, 0.0625, 0.0, 0.0]


def test_decay_of_no_steps_is_zero_from_its_start():
    assert _factors(4, decay_start=2, decay_steps=0) == [1.0, 1.0, 0.0, 0.0]


def test_warm_up_wins_over_decay():
    assert _factors(3, warmup_steps=2, decay_start=1, decay_steps=10)[:2] == pytest.approx([0.5, 1.0])


def test_cosine_goes_from_the_warm_ups_end_to_the_least_rate():
    factors = _factors(9, lr=0.4, warmup_steps=2, decay="cosine", decay_steps=4, min_lr=0.1)
    assert factors == pytest.approx([0.5, 1.0, 1.0, 0.8902, 0.625, 0.3598, 0.25, 0.25, 0.25], abs=1e-4)


def test_cosine_of_no_steps_goes_to_the_end_of_training():
    assert _factors(5, decay="cosine") == pytest.approx([1.0, 0.9045, 0.6545, 0.3455, 0.0955], abs=1e-4)
