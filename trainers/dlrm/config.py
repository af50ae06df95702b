"""What `model=` and `data=` have for DLRM."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

from trainers.config import DataConfig, ModelConfig

OPERATORS = ("embedding_all_to_all",)
ENGINES = {"ddp": "trainers.dlrm.engine:DDPEngine"}


@dataclass
class DLRMConfig(ModelConfig):
    """A DLRM: 13 dense features (unless told otherwise) and one embedding table a categorical feature."""

    family: str = "dlrm"
    num_dense: int = 13
    embedding_dim: int = MISSING
    table_rows: list[int] = MISSING
    multi_hot_sizes: list[int] | None = None  # ids a feature; None = one each
    bottom_mlp: list[int] = MISSING  # hidden widths after the dense input; the last equals embedding_dim
    top_mlp: list[int] = MISSING  # the last is 1
    interaction: str = "dot"  # dot | dcnv2; the next two are DCNv2's
    dcn_layers: int = 3
    dcn_low_rank: int = 512
    pooling: str = "sum"  # sum | mean
    embedding_dtype: str = "fp32"  # fp32 | fp16
    out_of_range: str = "error"  # error | clamp | hash


@dataclass
class ClicksConfig(DataConfig):
    """Click logs. `path`: prepared arrays (`python -m launch.prepare_criteo`)."""

    num_samples: int | None = None  # synthetic only


MODEL = DLRMConfig
DATA = {"criteo": ClicksConfig, "synthetic": ClicksConfig, "random": ClicksConfig}
