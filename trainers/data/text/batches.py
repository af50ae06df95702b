"""Batches of packed text."""

from __future__ import annotations

from collections.abc import Iterator

from trainers.data.errors import DataError
from trainers.data.order import SampleOrder
from trainers.data.prefetch import Prefetch
from trainers.data.text.batch import TextBatch, make_text_batch
from trainers.data.text.packing import PackedDocuments, Sample


class TextBatches:
    """This data-parallel rank's parts of the global batches, in steps that are the same for every rank.

    Samples are numbered through all epochs. The global batch of step s is samples s * batch_size .. (s + 1) * batch_size - 1,
    whatever `world` is, and rank r takes every world-th of them from its r-th on: parts differ by one sample at most, and
    may be empty. Tensor-parallel ranks of one model copy pass the same `rank`.

    epochs None   training: endless, every batch full (one may hold the end of an epoch and the beginning of the next).
                  The last partial sample of each epoch is dropped; another order of documents leaves out other tokens.
    epochs n      evaluation: n times through, every token a target; the last partial sample is padded with ignored
                  targets, the last batch may be smaller.
    shuffle       samples in an order of their own each epoch, so that a long document does not fill a batch.

    Iterating always begins at `start_step`, at no cost; a background thread reads ahead. DataError: arguments out of
    range, no whole sample to train on, or a token outside `vocabulary` (naming it).
    """

    def __init__(
        self,
        packed: PackedDocuments,
        batch_size: int,
        *,
        vocabulary: int,
        rank: int = 0,
        world: int = 1,
        seed: int = 0,
        shuffle: bool = False,
        start_step: int = 0,
        epochs: int | None = None,
    ):
        if batch_size < 1 or not 0 <= rank < world or min(start_step, seed) < 0 or (epochs is not None and epochs < 1):
            raise DataError(
                f"batch_size {batch_size}, rank {rank}, world {world}, start_step {start_step}, seed {seed}, epochs {epochs}: "
                "allowed are a batch of 1 or more, a rank below world, a step and a seed of 0 or more, and 1 epoch or more "
                "(None: endless)"
            )
        self.packed, self.batch_size, self.vocabulary = packed, batch_size, vocabulary
        self.rank, self.world, self.start_step = rank, world, start_step
        rest = epochs is not None and packed.left_over > 0
        self.samples_per_epoch = packed.whole_samples + rest
        if not self.samples_per_epoch:
            raise DataError(
                f"{packed.num_tokens} tokens are fewer than one sample of {packed.length}; a smaller length or more text "
                "is needed"
            )
        self.num_samples = None if epochs is None else epochs * self.samples_per_epoch
        self.end_step = None if self.num_samples is None else -(-self.num_samples // batch_size)
        self._order = SampleOrder(self.samples_per_epoch, batch_size, seed, shuffle)

    def __len__(self) -> int:
        """Steps from `start_step` to the end."""
        if self.end_step is None:
            raise TypeError("endless batches have no length")
        return max(self.end_step - self.start_step, 0)

    def __iter__(self) -> Iterator[TextBatch]:
        return Prefetch(self._batches())

    def _batches(self) -> Iterator[TextBatch]:
        step = self.start_step
        while self.end_step is None or step < self.end_step:
            yield self.read(step)
            step += 1

    def read(self, step: int) -> TextBatch:
        """This rank's part of the global batch of `step`."""
        start, stop = step * self.batch_size, (step + 1) * self.batch_size
        if self.num_samples is not None:
            stop = min(stop, self.num_samples)
        samples = [self.sample(number) for number in range(start + self.rank, stop, self.world)]
        return make_text_batch(samples, self.packed.length)

    def sample(self, number: int) -> Sample:
        """Sample `number` of the run, counted through all epochs."""
        epoch, position = divmod(number, self.samples_per_epoch)
        which = int(self._order.rows(epoch, position, position + 1)[0])
        sample = self.packed.read(epoch, which)
        smallest, largest = int(sample.tokens.min()), max(int(sample.tokens.max()), int(sample.targets.max()))
        if smallest < 0 or largest >= self.vocabulary:
            wrong = smallest if smallest < 0 else largest
            raise DataError(
                f"{self.packed.where}: token {wrong} in sample {number}, allowed are 0 .. {self.vocabulary - 1} (the "
                "model's vocabulary)"
            )
        return sample
