"""A short run of every stress scenario of the GEMM operators on the host; `python -m tests.stress.gemm` is the long one."""

import dataclasses

import pytest
import torch

from tests.ranks import run_ranks
from tests.stress.driver import Setting, chosen, launch
from tests.stress.gemm_problems import OPERATORS
from tests.stress.gemm_scenarios import check, plain
from tests.stress.lab import Lab

SHORT = Setting("gemm", device="cpu", link="auto", calls=200, seed=7, nccl=False)
ON_GPUS = dataclasses.replace(SHORT, device="cuda")


@pytest.mark.parametrize("name", chosen([], SHORT, 2))
def test_scenario(name):
    row = launch(name, 2, SHORT)
    assert row["ok"], row["detail"]


def test_uneven_worlds():
    row = launch("everything_at_once", 3, SHORT)
    assert row["ok"], row["detail"]


@pytest.mark.gpu
@pytest.mark.parametrize("link", ["peer", "pinned"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", chosen([], ON_GPUS, 2))
def test_scenario_on_gpus(name, ranks, link):
    row = launch(name, ranks, dataclasses.replace(ON_GPUS, link=link))
    assert row["ok"], row["detail"]


def one_wrong_element():
    for operator in OPERATORS:
        lab = Lab(torch.device("cpu"), calls=1, seed=0, timeout_s=10)
        call = plain(lab, operator)
        outputs = call.run(comm="host")
        outputs[0][2, 1] += 1
        check(lab, outputs, call.expected())
        with pytest.raises(AssertionError, match="1 wrong elements in 1 checked calls"):
            lab.finish()


def test_one_wrong_element_fails_a_scenario():
    run_ranks(1, one_wrong_element)
