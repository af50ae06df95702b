"""A DLRM in plain torch on one process: nn.EmbeddingBag, nn.Linear, torch optimizers. What the sharded model must equal."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from models.dlrm.init import fill_tables
from models.dlrm.model import build_dlrm
from tests.trainers import tiny
from trainers.config import RunConfig

TABLES = "sparse_arch.embedding_bag_collection.embedding_bags"


class PlainDLRM(nn.Module):
    """Starts from the sharded model's first weights."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        model = config.model
        torch.manual_seed(config.trainer.seed)
        first = {k: v for k, v in build_dlrm(model).state_dict().items() if "embedding_bags" not in k}
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, model.embedding_dim, mode=model.pooling) for rows in model.table_rows
        )
        named = {f"{TABLES}.table_{t}.weight": table.weight for t, table in enumerate(self.tables)}
        fill_tables(named, config.trainer.seed)
        self.bottom = _linears(first, "dense_arch")
        self.top = _linears(first, "over_arch")
        self.cross = nn.ParameterDict({k.replace(".", "_"): v.clone() for k, v in first.items() if "crossnet" in k})
        self.layers = model.dcn_layers

    def forward(self, batch: tiny.Batch) -> torch.Tensor:
        x = batch.dense
        for layer in self.bottom:
            x = layer(x).relu()
        jagged = [batch.sparse[key] for key in batch.sparse.keys()]  # noqa: SIM118 - no mapping
        pooled = [t(j.values(), j.offsets()[:-1]) for t, j in zip(self.tables, jagged, strict=True)]
        features = torch.stack([x, *pooled], dim=1)
        if self.cross:
            x0 = y = features.flatten(1)
            for i in range(self.layers):
                w, v, bias = (self.cross[f"inter_arch_crossnet_{k}_{i}"] for k in ("W_kernels", "V_kernels", "bias"))
                y = x0 * (y @ v.T @ w.T + bias) + y
        else:
            row, column = torch.triu_indices(features.shape[1], features.shape[1], offset=1)
            y = torch.cat([x, torch.bmm(features, features.transpose(1, 2))[:, row, column]], dim=1)
        for i, layer in enumerate(self.top):
            y = layer(y) if i == len(self.top) - 1 else layer(y).relu()
        return y.squeeze(1)


def train_plain(config: RunConfig) -> list[float]:
    """Losses of `trainer.steps` steps on the whole global batches."""
    model, optim = PlainDLRM(config), config.optim
    make = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}[optim.name]
    extra = {} if optim.name == "sgd" else {"eps": optim.eps}
    optimizer = make(model.parameters(), lr=optim.lr, **extra)
    losses = []
    batches = tiny.build_batches(config.data, config.model, "train", 0, 1)
    for _, batch in zip(range(config.trainer.steps), batches, strict=False):
        optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(model(batch), batch.labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def _linears(state: dict[str, torch.Tensor], arch: str) -> nn.ModuleList:
    layers = nn.ModuleList()
    for name, weight in state.items():
        if name.startswith(arch) and name.endswith("weight"):
            layer = nn.Linear(weight.shape[1], weight.shape[0])
            layer.weight.data.copy_(weight)
            layer.bias.data.copy_(state[name.removesuffix("weight") + "bias"])
            layers.append(layer)
    return layers
