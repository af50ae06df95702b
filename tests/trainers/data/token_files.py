"""Small token files for tests."""

from pathlib import Path

import numpy as np

from trainers.data.text.megatron import TokenFiles, TokenWriter

END = 99


def token_files(prefix: Path, documents: list[list[int]], ends_stored: bool, vocabulary: int = 10**6) -> TokenFiles:
    """Documents in files, each with END added where `ends_stored` (unless it is empty); every third in two sequences."""
    with TokenWriter(prefix, vocabulary) as writer:
        for number, document in enumerate(documents):
            tokens = np.array([*document, END] if ends_stored and document else document, np.int64)
            writer.add_document(*(np.array_split(tokens, 2) if number % 3 == 2 else [tokens]))
        writer.finish()
    return TokenFiles(prefix)


def distinct_documents(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Documents of 0 to `longest` tokens, all tokens different and none END."""
    rng = np.random.default_rng(seed)
    token = iter(range(100, 10**6))
    return [[next(token) for _ in range(rng.integers(0, longest + 1))] for _ in range(count)]
