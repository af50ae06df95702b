"""Which link GPU ranks take, and what keeps the CUDA backend from running: decided alike on all ranks, without a GPU here."""

from types import SimpleNamespace

import pytest
import torch

from fused_ops.errors import BackendUnavailableError
from fused_ops.symmetric import cuda_memory


class Group:
    """A group of ranks on `devices`; what this rank says comes back with the others' answers."""

    def __init__(self, devices, rank=0, link="auto", others_reach=True):
        self.name, self.world, self.rank, self.link = "g", len(devices), rank, link
        self.devices, self.others_reach, self.unreachable = devices, others_reach, None

    def exchange(self, what, mine):
        others = {
            "link": [{"device": d, "link": self.link} for d in self.devices],
            "reachable": [{"reachable": self.others_reach} for _ in self.devices],
            "cuda library": [{"problem": ""} for _ in self.devices],
        }[what]
        others[self.rank] = mine
        return others

    def fact(self, name, find):
        return find(self, -1)


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=f"gpu{i}"))

    def reach(can):
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: can)

    return reach


DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("devices", "can_reach", "others_reach", "link"),
    [
        (["gpu0", "gpu1"], True, True, "peer"),
        (["gpu0", "gpu1"], False, True, "pinned"),
        (["gpu0", "gpu1"], True, False, "pinned"),  # one pair without peer access decides for all
        (["gpu0", "gpu0"], False, True, "peer"),  # ranks that share a card
        (["gpu0", "elsewhere"], True, True, "pinned"),  # a card this rank does not see
    ],
)
def test_link_that_all_pairs_have(two_gpus, devices, can_reach, others_reach, link):
    two_gpus(can_reach)
    assert cuda_memory.choose_link(Group(devices, others_reach=others_reach), DEVICE) == (link, devices.count("gpu0"))


def test_a_link_asked_for_is_taken_or_refused(two_gpus):
    two_gpus(False)
    assert cuda_memory.choose_link(Group(["gpu0", "gpu1"], link="pinned"), DEVICE) == ("pinned", 1)
    with pytest.raises(BackendUnavailableError, match="not all devices of group 'g' reach each other"):
        cuda_memory.choose_link(Group(["gpu0", "gpu1"], link="peer"), DEVICE)


def test_a_rank_without_nvcc_is_everybodys_reason(monkeypatch):
    def no_library(index):
        raise BackendUnavailableError("no nvcc here")

    monkeypatch.setattr(cuda_memory, "library", no_library)
    assert cuda_memory.why_unavailable(Group(["gpu0", "gpu1"]), DEVICE) == "rank 0: no nvcc here"
    monkeypatch.setattr(cuda_memory, "library", lambda index: None)
    assert cuda_memory.why_unavailable(Group(["gpu0", "gpu1"]), DEVICE) is None


def test_too_many_ranks():
    reason = cuda_memory.why_unavailable(Group(["gpu0"] * 65), DEVICE)
    assert reason is not None
    assert "up to 64 ranks, group 'g' has 65" in reason
