"""Settings of every test process. Tests of several ranks use `tests.ranks.run_ranks`."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # ranks share the machine's cores
os.environ["WANDB_MODE"] = "offline"

import torch

torch.set_num_threads(1)
