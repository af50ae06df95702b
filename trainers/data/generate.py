"""Generated click logs in Criteo's format, with structure worth learning and a known Bayes AUC.

A sample's label is Bernoulli(sigmoid(logit)); the logit is a function of what the TSV shows, so its AUC is the best any
model can reach. It adds effects of the log-transformed integers, an effect for every category value, and products of
two values' effects (a crossed pair each). Categories are Zipf distributed. Sample i depends on the seed, the table rows
and i alone: a longer file starts with the shorter one, and several files can continue one another.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.csv

from trainers.data.errors import DataError
from trainers.data.layout import NUM_DENSE, NUM_SPARSE, write_json
from trainers.data.pool import ordered_map
from trainers.data.tsv import log_transform

KAGGLE_ROWS = [
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
    2173, 4, 7046547, 18, 15, 286181, 105, 142572,
]  # fmt: skip
BLOCK = 1 << 16  # samples of one random stream
BAYES_BLOCKS = 16  # 1,048,576 samples stand for the distribution, whatever the file's size
POSITIVE_RATE = 0.25
# Standard deviation of the logit, and the shares of its variance.
LOGIT_STD = 1.75
DENSE_SHARE, CATEGORY_SHARE, CROSS_SHARE = 0.4, 0.4, 0.2
NUM_CROSSES = 8


class Samples(NamedTuple):
    """A block of generated samples."""

    integers: np.ndarray  # int64 [13, n]; 0 where missing
    integer_missing: np.ndarray  # bool [13, n]
    ranks: np.ndarray  # uint32 [26, n]: 0 = the most frequent value of the feature
    category_missing: np.ndarray  # bool [26, n]
    probability: np.ndarray  # float64 [n] that the label is 1
    labels: np.ndarray  # bool [n]


def scaled_rows(scale: float) -> list[int]:
    """Kaggle's numbers of distinct values, those above 1000 multiplied by `scale` (but not below 1000)."""
    if not 0 < scale <= 100:
        raise DataError(f"rows scale: {scale}, allowed is a number above 0 and up to 100")
    return [rows if rows <= 1000 else max(1000, round(rows * scale)) for rows in KAGGLE_ROWS]


class ClickModel:
    """The distribution that a seed and the numbers of distinct values (26) decide."""

    def __init__(self, seed: int, table_rows: list[int]):
        if len(table_rows) != NUM_SPARSE or min(table_rows) < 1 or max(table_rows) >= 1 << 31:
            raise DataError(f"table rows: {NUM_SPARSE} numbers from 1 to 2^31 - 1 are needed, not {table_rows}")
        if seed < 0:
            raise DataError(f"seed: {seed}, allowed is 0 or more")
        self.seed, self.table_rows = seed, table_rows
        rng = np.random.default_rng([seed, 0])
        self._location = rng.uniform(0.5, 4, NUM_DENSE)
        self._spread = rng.uniform(0.5, 1.5, NUM_DENSE)
        self._integer_missing = rng.choice([0, 0.05, 0.2, 0.4], NUM_DENSE)
        self._zipf = rng.uniform(1.05, 1.35, NUM_SPARSE)
        self._category_missing = rng.choice([0, 0, 0, 0.03, 0.4], NUM_SPARSE)
        self._keys = rng.integers(0, 1 << 32, (2, NUM_SPARSE), dtype=np.uint32)  # of the values, of their effects
        self._slopes = rng.normal(size=NUM_DENSE)
        self._weights = rng.uniform(0.5, 1.5, NUM_SPARSE)
        pairs = [(i, j) for j in range(NUM_SPARSE) for i in range(j)]
        self._crosses = [pairs[p] for p in rng.choice(len(pairs), NUM_CROSSES, replace=False)]
        self._scale, self._offset = np.ones(3), np.zeros(3)
        self._bias = 0.0
        self._calibrate()

    def block(self, number: int, stop: int = BLOCK) -> Samples:
        """The first `stop` samples of block `number`, which holds samples number * BLOCK onwards."""
        rng = np.random.default_rng([self.seed, 1, number])
        # Everything is drawn for the whole block, so that a cut block is the start of the whole one.
        normal = rng.standard_normal((NUM_DENSE, BLOCK))[:, :stop]
        integer_missing = (rng.random((NUM_DENSE, BLOCK)) < self._integer_missing[:, None])[:, :stop]
        integers = np.exp(self._location[:, None] + self._spread[:, None] * normal).astype(np.int64) - 1
        integers[integer_missing] = 0
        uniform = rng.random((NUM_SPARSE, BLOCK))[:, :stop]
        ranks = np.stack([zipf(u, n, a) for u, n, a in zip(uniform, self.table_rows, self._zipf, strict=True)])
        category_missing = (rng.random((NUM_SPARSE, BLOCK)) < self._category_missing[:, None])[:, :stop]
        logit = self._bias + self._scale @ self._terms(integers, ranks, category_missing) - self._scale @ self._offset
        probability = 1 / (1 + np.exp(-logit))
        labels = rng.random(BLOCK)[:stop] < probability
        return Samples(integers, integer_missing, ranks, category_missing, probability, labels)

    def _terms(self, integers: np.ndarray, ranks: np.ndarray, missing: np.ndarray) -> np.ndarray:
        """The dense, category and crossed parts of the logit, unscaled, [3, n]."""
        dense = self._slopes @ ((log_transform(integers) - self._location[:, None]) / self._spread[:, None])
        effects = np.empty(ranks.shape)
        for i, key in enumerate(self._keys[1]):
            effects[i] = mix32(ranks[i] ^ key) * (2 / 2**32) - 1
        effects[missing] = 0
        crossed = sum(effects[i] * effects[j] for i, j in self._crosses)
        return np.stack([dense, self._weights @ effects, crossed])

    def _calibrate(self) -> None:
        """Scale the parts to their shares of the logit's variance and set the bias for the positive rate."""
        sample = self.block(0)
        terms = self._terms(sample.integers, sample.ranks, sample.category_missing)
        self._offset, spread = terms.mean(1), terms.std(1)
        shares = np.array([DENSE_SHARE, CATEGORY_SHARE, CROSS_SHARE])
        self._scale = LOGIT_STD * np.sqrt(shares) / np.where(spread > 0, spread, 1)
        logit = self._scale @ terms - self._scale @ self._offset
        low, high = -20.0, 20.0
        for _ in range(50):
            self._bias = (low + high) / 2
            above = (1 / (1 + np.exp(-logit - self._bias))).mean() > POSITIVE_RATE
            low, high = (low, self._bias) if above else (self._bias, high)

    def values(self, samples: Samples) -> Iterator[np.ndarray]:
        """A feature's 32-bit category values, uint32 [n], one feature after another."""
        for key, ranks in zip(self._keys[0], samples.ranks, strict=True):
            yield mix32(ranks + key)

    def bayes_metrics(self, workers: int = 2) -> dict[str, float]:
        """AUC and mean log loss of the true probability, and the positive rate, in expectation over the labels."""
        with ThreadPoolExecutor(workers) as pool:
            blocks = ordered_map(pool, lambda i: self.block(i).probability, range(BAYES_BLOCKS), workers + 1)
            p = np.sort(np.concatenate([probability for _, probability in blocks]))
        below = np.cumsum(1 - p) - (1 - p)  # expected negatives ranked below; ties do not matter at double precision
        entropy = -(p * np.log(p) + (1 - p) * np.log1p(-p)).mean()
        # A sample cannot be its own opponent, so p (1 - p) leaves the number of pairs.
        pairs = p.sum() * (1 - p).sum() - (p * (1 - p)).sum()
        return {
            "bayes_auc": float((p * below).sum() / pairs),
            "bayes_log_loss": float(entropy),
            "positive_rate": float(p.mean()),
        }


def zipf(uniform: np.ndarray, n: int, exponent: float) -> np.ndarray:
    """uint32 ranks 0 .. n - 1, rank k of weight about (k + 1) ** -exponent (not 1), from uniform [0, 1)."""
    power = 1 - exponent
    rank = (1 - uniform * (1 - (n + 1.0) ** power)) ** (1 / power)
    return np.minimum(rank.astype(np.int64) - 1, n - 1).astype(np.uint32)


def mix32(x: np.ndarray) -> np.ndarray:
    """A bijection of uint32 that scatters its bits (the finaliser of MurmurHash3)."""
    x = x ^ (x >> np.uint32(16))
    x *= np.uint32(0x85EBCA6B)
    x ^= x >> np.uint32(13)
    x *= np.uint32(0xC2B2AE35)
    x ^= x >> np.uint32(16)
    return x


_HEX_BYTES = np.array([f"{i:02x}".encode() for i in range(256)], "S2")


def to_tsv(model: ClickModel, samples: Samples) -> bytes:
    """The samples as lines of Criteo TSV."""
    n = len(samples.labels)
    columns: list[pa.Array] = [pa.array(samples.labels.astype(np.int8))]
    for integers, missing in zip(samples.integers, samples.integer_missing, strict=True):
        columns.append(pa.array(integers, mask=missing))
    offsets = pa.py_buffer(np.arange(0, 8 * n + 1, 8, dtype=np.int32))
    for values, missing in zip(model.values(samples), samples.category_missing, strict=True):
        text = _HEX_BYTES[values.astype(">u4").view(np.uint8)]
        valid = pa.array(~missing).buffers()[1]
        columns.append(pa.StringArray.from_buffers(n, offsets, pa.py_buffer(text), valid))
    sink = pa.BufferOutputStream()
    pa.csv.write_csv(
        pa.table(columns, [str(i) for i in range(len(columns))]),
        sink,
        pa.csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none", batch_size=4096),
    )
    return sink.getvalue().to_pybytes()


def generate(
    path: Path,
    samples: int,
    seed: int,
    table_rows: list[int],
    *,
    first_sample: int = 0,
    workers: int = 2,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Write samples `first_sample` onwards to `path`, a block at a time, and what they are to `path`.meta.json."""
    if samples < 1 or first_sample < 0:
        raise DataError(f"samples: {samples} from number {first_sample}, allowed is 1 or more from 0 or later")
    model = ClickModel(seed, table_rows)

    def text(number: int) -> tuple[int, int, bytes]:
        skip = max(first_sample - number * BLOCK, 0)
        block = model.block(number, min(first_sample + samples - number * BLOCK, BLOCK))
        part = Samples(*(column[..., skip:] for column in block))
        return len(part.labels), int(part.labels.sum()), to_tsv(model, part)

    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    blocks = range(first_sample // BLOCK, (first_sample + samples - 1) // BLOCK + 1)
    done = positives = 0
    with open(unfinished, "wb") as file, ThreadPoolExecutor(workers) as pool:
        for _, (number, positive, data) in ordered_map(pool, text, blocks, workers + 1):
            file.write(data)
            done, positives = done + number, positives + positive
            progress(done, samples)
    about = {
        "synthetic": True,
        "samples": samples,
        "first_sample": first_sample,
        "seed": seed,
        "table_rows": table_rows,
        "positives": positives,
        **model.bayes_metrics(workers),
        "bayes_samples": BAYES_BLOCKS * BLOCK,
    }
    # In this order a TSV file under its own name always has its description beside it.
    write_json(path.with_name(path.name + ".meta.json"), about)
    os.replace(unfinished, path)
    return about
