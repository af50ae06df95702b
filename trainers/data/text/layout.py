"""The on-disk layout of prepared text, and which documents are for training and which for evaluation.

tokens.bin, tokens.idx   Megatron's token files; every document ends in the end-of-document token
tokenizer.json           what made them
meta.json                what they hold; written last, so its presence means "complete"
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from trainers.data.errors import DataError
from trainers.data.layout import META_NAME, SPLITS, write_json

FORMAT = "text-megatron-1"
TOKENS = "tokens"  # the token files' prefix
TOKENIZER_NAME = "tokenizer.json"
UNFINISHED_NAME = ".unfinished"  # there while a preparation gives its files their names
DEFAULT_SHARES = ("0.95", "0.05", "0")


@dataclass
class TextMeta:
    """What a prepared directory holds; the content of `meta.json`."""

    documents: int
    tokens: int  # ends of documents included
    vocabulary: int
    end_of_document: int
    shares: list[str]  # of the documents: train, val, test
    split_seed: int
    sources: dict[str, Any]
    skipped: dict[str, Any]  # files in folders that are no text: {"count": n, "examples": [name, ...]}
    options: dict[str, Any]
    text_sha256: str  # of all documents: the same on another machine means the same text
    versions: dict[str, str] = field(default_factory=dict)
    format: str = FORMAT

    def splits(self) -> dict[str, np.ndarray]:
        """Document numbers of train, val and test."""
        return split_documents(self.documents, self.shares, self.split_seed)


def write_text_meta(directory: Path, meta: TextMeta) -> None:
    write_json(directory / META_NAME, asdict(meta))


def read_text_meta(directory: Path) -> TextMeta | None:
    """The directory's `meta.json`; None where there is none. DataError: it is another format's."""
    path = directory / META_NAME
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except json.JSONDecodeError as error:
        raise DataError(f"{path}: not valid JSON ({error})") from None
    found = raw.get("format") if isinstance(raw, dict) else None
    if found != FORMAT:
        raise DataError(f"{path}: format {found!r}, text has {FORMAT!r} in this version; prepare it with prepare_text")
    try:
        return TextMeta(**raw)
    except TypeError as error:
        raise DataError(f"{path}: {error}; prepare the text again") from None


def parse_shares(shares: list[str]) -> list[Fraction]:
    """Three shares (train, val, test) that add up to 1; those of val and test may be 0."""
    try:
        parsed = [Fraction(share) for share in shares]
    except (ValueError, ZeroDivisionError):
        parsed = []
    if len(parsed) != len(SPLITS) or parsed[0] <= 0 or min(parsed) < 0 or sum(parsed) != 1:
        raise DataError(
            f"shares {','.join(shares)}: three for train, val and test are needed, such as 0.95,0.05,0, that add up to 1, "
            "with some for train"
        )
    return parsed


def split_documents(num_documents: int, shares: list[str], seed: int) -> dict[str, np.ndarray]:
    """The documents of train, val and test, int64 and ascending: disjoint, drawn by seed, together all documents.

    A share above 0 gets at least one document, train first.
    """
    parsed = dict(zip(SPLITS, parse_shares(shares), strict=True))
    drawn = np.random.default_rng([seed, num_documents]).permutation(num_documents)
    result, taken = {}, 0
    for split in ("val", "test"):
        wanted = max(1, round(parsed[split] * num_documents)) if parsed[split] else 0
        # At least one document stays for training.
        wanted = min(wanted, max(num_documents - taken - 1, 0))
        result[split] = np.sort(drawn[taken : taken + wanted])
        taken += wanted
    result["train"] = np.sort(drawn[taken:])
    return {split: result[split] for split in SPLITS}
