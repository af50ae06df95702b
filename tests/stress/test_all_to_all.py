"""A short run of every stress scenario on the host; `python -m tests.stress.all_to_all` is the long one."""

import dataclasses

import pytest
import torch

from tests.ranks import run_ranks
from tests.stress.driver import Setting, chosen, launch
from tests.stress.lab import Lab, Layout

SHORT = Setting("all_to_all", device="cpu", link="auto", calls=200, seed=7, nccl=False)
ON_GPUS = dataclasses.replace(SHORT, device="cuda")


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", chosen([], SHORT, 2))
def test_scenario(name, ranks):
    row = launch(name, ranks, SHORT)
    assert row["ok"], row["detail"]


@pytest.mark.gpu
@pytest.mark.parametrize("link", ["peer", "pinned"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", chosen([], ON_GPUS, 2))
def test_scenario_on_gpus(name, ranks, link):
    """Ranks share a card where there are fewer cards than ranks: right there too, and fast only under an MPS daemon."""
    row = launch(name, ranks, dataclasses.replace(ON_GPUS, link=link))
    assert row["ok"], row["detail"]


def one_wrong_element():
    lab = Lab(torch.device("cpu"), calls=1, seed=0, timeout_s=10)
    _, output, expected = lab.send(Layout.plain(1, 3), 0)
    output[2, 1] += 1
    lab.check(output, expected)
    with pytest.raises(AssertionError, match="1 wrong elements in 1 checked calls"):
        lab.finish()


def test_one_wrong_element_fails_a_scenario():
    run_ranks(1, one_wrong_element)
