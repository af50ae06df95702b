"""The vocabulary-parallel embedding equals the unsplit table, gradients too."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from models.parallel.embedding import VocabularyParallelEmbedding
from models.parallel.shards import even_split, load_full
from models.parallel.tensor_parallel import TensorParallel
from models.parallel.vocabulary import padded_vocabulary
from tests.models.close import assert_close, assert_same_on_all_ranks
from tests.ranks import run_ranks

WIDTH = 5


def lookups(scatter: bool) -> None:
    tp = TensorParallel(dist.group.WORLD)
    for vocabulary, multiple in ((11, 1), (11, 8), (12, 4), (3, 1)):
        for rows in (7, 6, 1, 0):
            generator = torch.Generator().manual_seed(vocabulary + rows)
            tokens = torch.randint(0, vocabulary, (rows,), generator=generator)
            table = torch.randn(padded_vocabulary(vocabulary, multiple), WIDTH, generator=generator).requires_grad_()
            replicated = torch.randn(rows, WIDTH, generator=generator).requires_grad_()
            layer = VocabularyParallelEmbedding(vocabulary, WIDTH, multiple, tp)
            load_full(layer, {"weight": table})
            local = replicated.detach().clone().requires_grad_()

            want = F.embedding(tokens, table) + replicated
            got = layer(tokens, local, scatter=scatter)
            start, stop = even_split(rows, tp.world, tp.rank) if scatter else (0, rows)
            assert_close(got, want[start:stop], "rows")
            factor = torch.randn(rows, WIDTH, generator=generator)
            (want * factor).sum().backward()
            (got * factor[start:stop]).sum().backward()
            assert_close(layer.weight.grad, layer.shards["weight"].of(table.grad), "gradient of the table")
            assert_close(local.grad, replicated.grad, "gradient of what is replicated")
            assert_same_on_all_ranks(local.grad)


@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_equal_to_the_unsplit_table(world, scatter):
    run_ranks(world, lookups, scatter)


def refusals():
    tp = TensorParallel(dist.group.WORLD)
    layer = VocabularyParallelEmbedding(11, WIDTH, 8, tp)
    for token in (-1, 11, 15):  # 15 is a row of padding
        with pytest.raises(ValueError, match=rf"token {token} is outside \[0, 11\)"):
            layer(torch.tensor([0, token]))
    with pytest.raises(ValueError, match="cannot be split over 3 ranks"):
        VocabularyParallelEmbedding(2, WIDTH, 1, tp)


def test_refusals():
    run_ranks(3, refusals)
