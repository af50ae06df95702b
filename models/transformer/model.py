"""A tensor-parallel, decoder-only Transformer (Megatron-LM, arXiv 1909.08053; sequence parallelism: arXiv 2205.05198)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.parallel.collectives import gather_columns
from models.parallel.cross_entropy import vocabulary_parallel_cross_entropy
from models.parallel.embedding import VocabularyParallelEmbedding
from models.parallel.initial_values import fill_normal
from models.parallel.linear import column_parallel_linear
from models.parallel.range_check import outside
from models.parallel.shards import Shard, even_split, parameter_shards
from models.parallel.tensor_parallel import TensorParallel
from models.transformer.attention import Attention, Sequences, local_kv_heads
from models.transformer.config import TransformerConfig
from models.transformer.kv_cache import KVCache
from models.transformer.mlp import MLP
from models.transformer.norm import Norm
from models.transformer.rotary import rotation


class Block(nn.Module):
    def __init__(self, config: TransformerConfig, layer: int, tp: TensorParallel) -> None:
        super().__init__()
        self.attention_norm = Norm(config.norm, config.width, config.norm_eps, tp)
        self.attention = Attention(config, layer, tp)
        self.mlp_norm = Norm(config.norm, config.width, config.norm_eps, tp)
        self.mlp = MLP(config, tp)

    def forward(self, hidden: Tensor, sequences: Sequences) -> Tensor:
        split = sequences.total_rows is not None
        hidden = hidden + self.attention(self.attention_norm(hidden, split), sequences)
        return hidden + self.mlp(self.mlp_norm(hidden, split), sequences.total_rows)


class Output(nn.Module):
    """Untied output weight [V_r, H], split as the embedding is."""

    def __init__(self, embedding: VocabularyParallelEmbedding) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty_like(embedding.weight))
        self.shards = dict(embedding.shards)


class Transformer(nn.Module):
    """Parameter names and whole shapes are the same for every `tp`; `parallel.shards.parameter_shards` says who holds what.

    All ranks of `tp.group` call it with the same tokens. Every parameter's gradient is whole after backward (that of its
    shard, or of the replicated parameter, equal on all ranks), under sequence parallelism too.

    checkpoint_activations: keep the input of each block alone, and run the block again in backward.
    Weights are unset until `initialize`, `shards.load_full` or `huggingface.load_llama`.
    """

    def __init__(
        self, config: TransformerConfig, tp: TensorParallel | None = None, checkpoint_activations: bool = False
    ) -> None:
        super().__init__()
        tp = tp or TensorParallel()
        self.config, self.tp, self.checkpoint_activations = config, tp, checkpoint_activations
        self.embedding = VocabularyParallelEmbedding(config.vocabulary, config.width, config.vocabulary_multiple, tp)
        self.positions = nn.Embedding(config.max_length, config.width) if config.positions == "learned" else None
        self.blocks = nn.ModuleList(Block(config, layer, tp) for layer in range(config.layers))
        self.norm = Norm(config.norm, config.width, config.norm_eps, tp)
        self.output = None if config.tied_output else Output(self.embedding)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Cross-entropy of every token, [B, S] fp32, equal on all ranks; 0 where the target is -100.

        tokens, targets: [B, S] int64. positions: [B, S], where they restart within a sample; None = 0 .. S-1.
        documents: [B, S] int; a token attends to its own document only. B * S need not divide by the ranks.
        """
        self._check(tokens, positions=positions, documents=documents, targets=targets)
        split = self.tp.sequence_parallel and self.tp.world > 1
        sequences = self._sequences(tokens, positions, documents, split)
        logits = self._local_logits(self._hidden(tokens, sequences), sequences.total_rows)
        losses = vocabulary_parallel_cross_entropy(
            logits, targets.flatten(), self._vocabulary_span(self.tp.rank)[0], self.config.vocabulary, self.tp
        )
        return losses.view(tokens.shape)

    def logits(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: KVCache | None = None,
        at: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, S, vocabulary] of tokens [B, S], gathered to every rank; never sequence parallel.

        at: [B] int64, one token a sequence; then [B, vocabulary].
        cache: tokens follow those in it, and are added to it; positions are the cache's, and documents have no meaning.
        """
        self._check(tokens, positions=positions, documents=documents)
        if at is not None and at.shape != tokens.shape[:1]:
            raise ValueError(f"at must name one token a sequence, [{len(tokens)}], got {list(at.shape)}")
        if cache is None:
            sequences = self._sequences(tokens, positions, documents, split=False)
        else:
            if positions is not None or documents is not None:
                raise ValueError("with a KV cache, positions and documents are the cache's; leave them out")
            if torch.is_grad_enabled():
                raise ValueError("a KV cache is written in place, which has no gradient; use torch.no_grad()")
            sequences = self._cached_sequences(tokens, cache)
        hidden = self._hidden(tokens, sequences).view(*tokens.shape, self.config.width)
        if cache is not None:
            cache.advance(tokens.shape[1])
        if at is not None:
            hidden = hidden[torch.arange(len(tokens), device=tokens.device), at]
        logits = self._local_logits(hidden.reshape(-1, self.config.width), None)
        spans = [self._vocabulary_span(rank) for rank in range(self.tp.world)]
        gathered = gather_columns(logits, [stop - start for start, stop in spans], self.tp)
        return gathered.view(*hidden.shape[:-1], self.config.vocabulary)

    def new_cache(self, batch: int, max_length: int, dtype: torch.dtype | None = None, static: bool = False) -> KVCache:
        """An empty cache for `batch` sequences of up to `max_length` tokens, in the weights' dtype unless told otherwise."""
        if self.positions is not None and max_length > self.config.max_length:
            raise ValueError(
                f"max_length is {max_length}, and the model has {self.config.max_length} learned positions"
            )
        weight = self.embedding.weight
        return KVCache(
            self.config.layers,
            batch,
            max_length,
            local_kv_heads(self.config, self.tp),
            self.config.size_of_head,
            dtype or weight.dtype,
            weight.device,
            static,
        )

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """First weights, those of the unsplit model whatever `tp` is."""
        shards = parameter_shards(self)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1)
            else:
                residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
                std = self.config.init_std / (math.sqrt(2 * self.config.layers) if residual else 1)
                fill_normal(parameter, shards.get(name), name, std, seed)

    def _hidden(self, tokens: Tensor, sequences: Sequences) -> Tensor:
        """[M, H] after the last norm, or this rank's rows."""
        split = sequences.total_rows is not None
        learned = None
        if self.positions is not None:
            ids = sequences.positions.flatten()
            bad = outside(ids, self.config.max_length, "position")
            learned = F.embedding(ids.masked_fill(bad, 0), self.positions.weight)
            learned = learned.masked_fill(bad.unsqueeze(-1), float("nan"))
        hidden = self.embedding(tokens.flatten(), learned, scatter=split)
        recompute = self.checkpoint_activations and torch.is_grad_enabled()
        for block in self.blocks:
            if recompute:
                hidden = checkpoint(block, hidden, sequences, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden = block(hidden, sequences)
        return self.norm(hidden, split)

    def _local_logits(self, hidden: Tensor, total_rows: int | None) -> Tensor:
        """[M, V_r]: this rank's columns, without those of the padding."""
        weight = self.embedding.weight if self.output is None else self.output.weight
        start, stop = self._vocabulary_span(self.tp.rank)
        return column_parallel_linear(hidden, weight, None, self.tp, total_rows)[:, : stop - start]

    def _vocabulary_span(self, rank: int) -> tuple[int, int]:
        """(start, stop) of the rank's part of the vocabulary, which is shorter than its part of the padded table."""
        shard: Shard = self.embedding.shards["weight"]
        start, stop = even_split(shard.full_size, self.tp.world, rank)
        return min(start, self.config.vocabulary), min(stop, self.config.vocabulary)

    def _sequences(self, tokens: Tensor, positions: Tensor | None, documents: Tensor | None, split: bool) -> Sequences:
        batch, length = tokens.shape
        if positions is None:
            positions = torch.arange(length, device=tokens.device).expand(batch, length)
        mask = None
        if documents is not None:
            same = documents.unsqueeze(2) == documents.unsqueeze(1)
            mask = same.tril().unsqueeze(1)
        rows = tokens.numel() if split else None
        return Sequences(batch, length, positions, self._rotation(positions), mask, rows)

    def _cached_sequences(self, tokens: Tensor, cache: KVCache) -> Sequences:
        batch, length = tokens.shape
        if batch != len(cache.lengths):
            raise ValueError(f"the KV cache is for {len(cache.lengths)} sequences, and {batch} came")
        positions = cache.positions(length)
        # Nothing came before: plain causal attention, for which SDPA has faster kernels.
        mask = None if cache.empty and not cache.static else cache.visible(positions)
        return Sequences(batch, length, positions, self._rotation(positions), mask, None, cache=cache)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        return rotation(positions, self.config) if self.config.positions == "rope" else None

    def _check(self, tokens: Tensor, **others: Tensor | None) -> None:
        """ValueError for what every rank sees alike, before any of them waits."""
        if tokens.dim() != 2 or tokens.dtype != torch.int64:
            raise ValueError(f"tokens must be [batch, length] int64, got {list(tokens.shape)} {tokens.dtype}")
        for name, other in others.items():
            if other is not None and other.shape != tokens.shape:
                raise ValueError(f"{name} must be {list(tokens.shape)} as the tokens are, got {list(other.shape)}")
        if self.positions is not None and tokens.shape[1] > self.config.max_length and others.get("positions") is None:
            raise ValueError(f"{tokens.shape[1]} tokens, and the model has {self.config.max_length} learned positions")
