"""Inputs of the baseline kernels, with offsets and indices looked at."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_ops.embedding_inputs import OPERATOR, EmbeddingInputs


class Lookups:
    """Inputs that passed `check`, with `indices` and `offsets` int64, every index a row of its table (ValueError, or clamp, or
    hash). Made by looking at values, so on a GPU by waiting for it.

    `seen`: forward has checked the values; they are only made valid again where the policy asks for it.
    """

    def __init__(self, inputs: EmbeddingInputs, seen: bool = False) -> None:
        self.inputs = inputs
        self.tables = inputs.tables
        self.feature_tables = inputs.feature_tables
        self.weights = None if inputs.weights is None else inputs.weights.detach()
        self.mean = inputs.pooling == "mean"
        self.batch = inputs.layout.global_batch
        self.offsets = inputs.offsets.to(torch.int64).contiguous()
        if not seen:
            self._check_offsets()
        # First lookup of each feature, and the end.
        self.bounds: list[int] = self.offsets[:: self.batch].tolist() if self.batch else [0] * (len(inputs.dims) + 1)
        self.indices = inputs.indices.to(torch.int64).contiguous()
        if not seen or inputs.out_of_range != "error":
            self.indices = self._valid_indices(self.indices)

    def _check_offsets(self) -> None:
        offsets, nnz = self.offsets, self.inputs.indices.numel()
        if offsets[0] != 0:
            raise ValueError(f"{OPERATOR}: offsets must start with 0, got {int(offsets[0])}")
        if offsets[-1] != nnz:
            raise ValueError(f"{OPERATOR}: offsets must end with the number of indices, {nnz}, got {int(offsets[-1])}")
        falls = offsets[1:] < offsets[:-1]
        if falls.any():
            at = int(falls.nonzero()[0]) + 1
            raise ValueError(
                f"{OPERATOR}: offsets must not decrease: offsets[{at}] = {int(offsets[at])} is below offsets[{at - 1}] "
                f"(feature {(at - 1) // self.batch})"
            )

    def _valid_indices(self, indices: Tensor) -> Tensor:
        copied = False
        for f in range(len(self.inputs.dims)):
            part, rows = self.of_feature(indices, f), self.rows(f)
            if part.numel() == 0:
                continue
            low, high = (int(x) for x in torch.aminmax(part))
            if low >= 0 and high < rows:
                continue
            if self.inputs.out_of_range == "error" or rows == 0:
                at = int(((part < 0) | (part >= rows)).nonzero()[0])
                raise ValueError(self.inputs.describe_index(f, self.bounds[f] + at, int(part[at])))
            if not copied:
                indices, copied = indices.clone(), True
                part = self.of_feature(indices, f)
            if self.inputs.out_of_range == "clamp":
                part.clamp_(0, rows - 1)
            else:
                part.remainder_(rows)
        return indices

    def rows(self, feature: int) -> int:
        return self.tables[self.feature_tables[feature]].shape[0]

    def of_feature(self, per_lookup: Tensor, feature: int) -> Tensor:
        """The part of a [nnz] tensor that belongs to a feature."""
        return per_lookup[self.bounds[feature] : self.bounds[feature + 1]]

    def feature_offsets(self, feature: int) -> Tensor:
        """[B + 1], from 0 on."""
        return self.offsets[feature * self.batch : (feature + 1) * self.batch + 1] - self.bounds[feature]

    def lengths_of_lookups(self) -> Tensor:
        """[nnz]: the length of the bag each lookup is in."""
        lengths = self.offsets.diff()
        return torch.repeat_interleave(lengths, lengths)
