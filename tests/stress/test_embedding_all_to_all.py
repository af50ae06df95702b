"""A short run of every stress scenario on the host; `python -m tests.stress.embedding_all_to_all` is the long one."""

import dataclasses

import pytest

from tests.stress.driver import Setting, chosen, launch

SHORT = Setting("embedding_all_to_all", device="cpu", link="auto", calls=200, seed=7, nccl=False)
ON_GPUS = dataclasses.replace(SHORT, device="cuda")


@pytest.mark.parametrize("name", chosen([], SHORT, 2))
def test_scenario(name):
    row = launch(name, 2, SHORT)
    assert row["ok"], row["detail"]


@pytest.mark.gpu
@pytest.mark.parametrize("link", ["peer", "pinned"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", chosen([], ON_GPUS, 2))
def test_scenario_on_gpus(name, ranks, link):
    row = launch(name, ranks, dataclasses.replace(ON_GPUS, link=link))
    assert row["ok"], row["detail"]
