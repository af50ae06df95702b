"""The lab on a GPU: processes reach the daemon, and NCCL takes two ranks on one card."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from launch.lab import mps, nccl
from launch.lab.mps_keeper import daemon_pid
from tests.ranks import run_ranks, take_card

pytestmark = pytest.mark.gpu

CLIENT = "import torch; assert torch.ones(3, device='cuda').sum().item() == 3"


def test_a_process_reaches_a_private_daemon_which_then_ends():
    daemon = mps.PrivateMps()
    try:
        assert mps.servers(daemon.directory) == []
        env = {**os.environ, **daemon.environment}
        subprocess.run([sys.executable, "-c", CLIENT], env=env, check=True, timeout=120)
        assert mps.servers(daemon.directory)
        pid = daemon_pid(daemon.directory)
    finally:
        daemon.close()
    assert not Path(f"/proc/{pid}").exists()


def sum_of_ranks():
    device = take_card()
    data = torch.full((1000,), float(dist.get_rank() + 1), device=device)
    dist.all_reduce(data)
    return data.unique().tolist(), nccl.loaded_version()


def test_nccl_takes_two_ranks_on_one_card():
    path = nccl.chosen(None)
    version = nccl.version_of(path) if path else nccl.loaded_version()
    if torch.cuda.device_count() == 1 and (version is None or version < nccl.OLDEST):
        pytest.skip(f"NCCL {version} does not let ranks share a card; {nccl.SETTING} names one that does")
    for values, used in run_ranks(2, sum_of_ranks, backend="nccl", timeout=120):
        assert values == [3.0]
        assert used == version
