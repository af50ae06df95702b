"""Documents joined and cut into samples of one length, without padding or loss.

An epoch is a stream: the documents in this epoch's order, each followed by the end-of-document token E. Sample i has the
targets stream[i * length : (i + 1) * length]; its inputs are the tokens before them, and an E before the first:

    stream      a1 a2 a3 E  b1 b2 E  c1 ...
    inputs      E  a1 a2 a3 E  b1 b2 E  ...
    documents   0  0  0  0  1  1  1  2
    positions   0  1  2  3  0  1  2  0

So every token, the E's too, is a target exactly once an epoch, and is predicted from its own document alone: an E as
target ends its document, the same E as input begins the next one. A document that a sample's end cuts goes on at position
0 of another sample.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from trainers.data.errors import DataError
from trainers.data.text.megatron import TokenFiles

IGNORED = -100  # as a target: nothing is to be predicted here
_CHECKED_DOCUMENTS = 64
_DOCUMENT_STREAM = (0, 1)  # apart from SampleOrder's, which draws from (seed, epoch) and (seed, epoch, window)


class Sample(NamedTuple):
    """One sample; each array is [length]."""

    tokens: np.ndarray  # int64
    targets: np.ndarray  # int64; IGNORED beyond the stream's end
    positions: np.ndarray  # int64; restart at 0 where a document begins
    documents: np.ndarray  # int32; 0, and 1 more from each beginning on; padding has a number of its own


class PackedDocuments:
    """Samples of `documents` (numbers in `files`), any of them read at once without those before it.

    length           tokens a sample
    end_of_document  the token E; `ends_stored` says that documents already end in it, else it is added to each
    shuffle          documents in an order drawn from (seed, epoch); else as given

    num_tokens       of the stream: every document and every E; the same in all epochs
    whole_samples    of length targets; what is left over, `num_tokens - whole_samples * length` targets, is one more, padded

    Documents without a token are left out. Memory: 16 bytes a document for each of the two epochs last read.
    DataError: no tokens, or stored documents that contradict `ends_stored`.
    """

    def __init__(
        self,
        files: TokenFiles,
        documents: np.ndarray,
        length: int,
        *,
        end_of_document: int,
        ends_stored: bool,
        seed: int = 0,
        shuffle: bool = False,
    ):
        if length < 1 or seed < 0:
            raise DataError(f"length {length}, seed {seed}: allowed are a length of 1 or more and a seed of 0 or more")
        self.length, self.end_of_document, self.where = length, end_of_document, files.bin
        self._files, self._ends_stored, self._seed, self._shuffle = files, ends_stored, seed, shuffle
        self._documents = documents[files.lengths[documents] > 0]
        self.num_tokens = int(files.lengths[self._documents].sum()) + (0 if ends_stored else len(self._documents))
        self.whole_samples, self.left_over = divmod(self.num_tokens, length)
        self._order = lru_cache(2)(self._draw_order)
        self._check_ends()

    def read(self, epoch: int, number: int) -> Sample:
        """Sample `number` of an epoch; number `whole_samples` is the padded rest."""
        start = number * self.length
        stop = min(start + self.length, self.num_tokens)
        assert 0 <= start < stop, (number, self.whole_samples)
        stream, begins = self._stream(epoch, max(start - 1, 0), stop)
        if start:
            before, targets, begins = stream[:-1], stream[1:], begins[1:]
        else:
            before, targets = np.append(self.end_of_document, stream[:-1]), stream
        return self._sample(before, targets, begins)

    def _stream(self, epoch: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """int64 tokens start .. stop - 1 of an epoch's stream, and which of them begin a document."""
        documents, ends = self._order(epoch)
        tokens = np.empty(stop - start, np.int64)
        begins = np.zeros(stop - start, bool)
        at = start
        for i in range(int(ends.searchsorted(start, side="right")), len(ends)):
            if at >= stop:
                break
            first = int(ends[i - 1]) if i else 0
            part = self._files.document(documents[i], at - first, stop - first)
            tokens[at - start : at - start + len(part)] = part
            begins[at - start] |= at == first
            at += len(part)
            if not self._ends_stored and at < stop:
                tokens[at - start] = self.end_of_document
                at += 1
        return tokens, begins

    def _sample(self, tokens: np.ndarray, targets: np.ndarray, begins: np.ndarray) -> Sample:
        padding = self.length - len(tokens)
        if padding:
            tokens = np.append(tokens, np.full(padding, self.end_of_document))
            targets = np.append(targets, np.full(padding, IGNORED))
            begins = np.append(begins, np.arange(padding) == 0)
        begins[0] = True
        index = np.arange(self.length)
        positions = index - np.maximum.accumulate(np.where(begins, index, 0))
        return Sample(tokens, targets, positions, np.cumsum(begins, dtype=np.int32) - 1)

    def _draw_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The documents in an epoch's order, and where in the stream each ends (its E included)."""
        documents = self._documents
        if self._shuffle:
            documents = np.random.default_rng([self._seed, epoch, *_DOCUMENT_STREAM]).permutation(documents)
        lengths = self._files.lengths[documents]
        return documents, np.cumsum(lengths if self._ends_stored else lengths + 1)

    def _check_ends(self) -> None:
        if not len(self._documents):
            raise DataError(f"{self._files.bin}: no document has a token")
        spread = np.linspace(0, len(self._documents) - 1, min(_CHECKED_DOCUMENTS, len(self._documents)), dtype=np.int64)
        for number in self._documents[spread]:
            last = int(self._files.document(number)[-1])
            if (last == self.end_of_document) != self._ends_stored:
                stored = "should end in" if self._ends_stored else "should not yet end in"
                raise DataError(
                    f"{self._files.bin}: document {number} {stored} the end-of-document token {self.end_of_document}, but "
                    f"its last token is {last}; another token or setting is needed"
                )
