import torch

from models.dlrm import init
from models.dlrm.init import fill_tables


def test_the_same_seed_and_name_give_the_same_rows_in_any_chunks(monkeypatch):
    whole, chunked, other = (torch.zeros(100, 8) for _ in range(3))
    fill_tables({"a": whole}, 1)
    fill_tables({"b": other}, 1)
    monkeypatch.setattr(init, "CHUNK_ELEMENTS", 8 * 7)
    fill_tables({"a": chunked}, 1)
    assert torch.equal(whole, chunked)
    assert not torch.equal(whole, other)


def test_seeds_differ_and_the_bound_follows_the_rows():
    one, two = torch.zeros(400, 8), torch.zeros(400, 8)
    fill_tables({"a": one}, 1)
    fill_tables({"a": two}, 2)
    assert not torch.equal(one, two)
    assert one.abs().max() <= 1 / 20 + 1e-7
    assert one.abs().max() > 0.9 / 20
