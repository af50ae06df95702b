"""Several ranks on one GPU: a private MPS daemon, an NCCL that lets ranks share a card, and the settings both need.

    with OneGpuLab(ranks_per_gpu=4) as lab:     # os.environ is set for every process started inside
        ...                                     # each rank calls `trainers.card.take_card`
    python -m launch.lab ranks_per_gpu=4 -- torchrun --nproc-per-node 4 ...

docs/one-gpu-lab.md says what such a run can and cannot show.
"""

from launch.lab.errors import LabError
from launch.lab.one_gpu import OneGpuLab

__all__ = ["LabError", "OneGpuLab"]
