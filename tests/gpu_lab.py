"""The lab that GPU tests run in where a machine has fewer cards than the tests have ranks.

Set up before the first test, since an NCCL library in LD_PRELOAD has to be there when processes start. FUSECOMM_LAB=off runs
the tests without: ranks then take turns on the card, which is right and slow.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import pytest
import torch

from launch.lab import LabError, OneGpuLab

MOST_RANKS = 4  # of a GPU test


def start_for(items: Iterable[pytest.Item]) -> OneGpuLab | None:
    """The lab for these tests; None where none is needed. Ends pytest with one line where it cannot be set up."""
    cards = torch.cuda.device_count()
    wanted = os.environ.get("FUSECOMM_LAB", "on") != "off" and 0 < cards < MOST_RANKS
    if not wanted or not any(item.get_closest_marker("gpu") for item in items):
        return None
    try:
        return OneGpuLab(-(-MOST_RANKS // cards), needs_nccl=False)
    except LabError as error:
        pytest.exit(f"the GPU tests' lab: {error} (FUSECOMM_LAB=off runs them without one)", returncode=2)
