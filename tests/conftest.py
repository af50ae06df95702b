"""Settings of every test process. Tests of several ranks use `tests.ranks.run_ranks`."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # ranks share the machine's cores
os.environ["WANDB_MODE"] = "offline"

import pytest
import torch

from tests import gpu_lab

torch.set_num_threads(1)

LAB = pytest.StashKey[object]()


def pytest_collection_finish(session):
    if not session.config.option.collectonly:
        session.config.stash[LAB] = gpu_lab.start_for(session.items)


def pytest_unconfigure(config):
    lab = config.stash.get(LAB, None)
    if lab is not None:
        lab.close()
