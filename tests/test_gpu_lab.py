"""GPU tests get a lab where cards are too few for their ranks, and only there."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fused_ops
from fused_ops.launch_geometry import num_blocks
from tests import gpu_lab
from tests.ranks import take_card

FAKE_MPS = Path(__file__).parent / "launch" / "fake_mps"
GPU_TEST = SimpleNamespace(get_closest_marker=lambda name: name == "gpu")
CPU_TEST = SimpleNamespace(get_closest_marker=lambda name: None)


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """With one card and, in name, MPS."""
    for name in ("CUDA_MPS_PIPE_DIRECTORY", "FUSECOMM_LAB", "FUSECOMM_NCCL", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{FAKE_MPS}:{os.environ['PATH']}")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


def test_one_card_gets_a_lab():
    lab = gpu_lab.start_for([CPU_TEST, GPU_TEST])
    assert (lab.mps, lab.ranks_per_gpu) == ("private", 4)
    assert "CUDA_MPS_PIPE_DIRECTORY" in os.environ
    lab.close()
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ


def test_no_lab_is_started_where_none_is_needed(monkeypatch):
    assert gpu_lab.start_for([CPU_TEST]) is None
    for cards in (0, 4):
        monkeypatch.setattr(torch.cuda, "device_count", lambda cards=cards: cards)
        assert gpu_lab.start_for([GPU_TEST]) is None
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("FUSECOMM_LAB", "off")
    assert gpu_lab.start_for([GPU_TEST]) is None


def test_what_is_missing_ends_the_tests(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(pytest.exit.Exception, match=r"nvidia-cuda-mps-control is not on PATH.*FUSECOMM_LAB=off"):
        gpu_lab.start_for([GPU_TEST])


@pytest.mark.parametrize(("cards", "card", "sms"), [(1, 0, 33), (2, 1, 66), (4, 3, 132)])
def test_ranks_fill_the_cards_and_share_their_sms(cards, card, sms, monkeypatch):
    taken = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    try:
        assert take_card() == torch.device("cuda", card)
        assert taken == [torch.device("cuda", card)]
        assert num_blocks(1000, 132) == sms
    finally:
        fused_ops.set_num_sms(None)


def test_too_few_cards_are_named(monkeypatch):
    from trainers.card import take_card as take

    with pytest.raises(ValueError, match=r"rank 2 needs card 1 \(ranks_per_gpu=2\), and torch sees 1"):
        take(2, 2)
