"""The CUDA session of launch.bench: its logic with a stand-in for the device, and, on a GPU, real rows."""

import json

import pytest

from launch.bench import __main__ as bench
from tests.launch import fake_device
from tests.ranks import run_ranks

WORDS = [
    *("device=cuda", "ranks=2", "ranks_per_gpu=2", "backends=[baseline,unfused]", "rounds=3", "warmup=1"),
    *("tables=3", "rows=50", "dim=8", "pooling=2", "batch=7"),
]
WHOLE = [
    ("baseline", "forward"),
    ("baseline", "forward_backward"),
    ("unfused", "forward"),
    ("unfused", "forward_backward"),
]
ALONE = [("baseline", "compute_alone"), ("baseline", "exchange_alone")]


def session(spoil=None, words=WORDS):
    """({position: rows}, notes) of rank 0, once every rank has been seen to say the same."""
    (blocks, notes), (others, their_notes) = run_ranks(2, fake_device.session_rows, words, spoil, timeout=120)
    assert notes == their_notes
    measured = [[{k: v for k, v in row.items() if k != "limit"} for row in rows] for _, rows in blocks]
    assert measured == [[{k: v for k, v in row.items() if k != "limit"} for row in rows] for _, rows in others]
    return dict(blocks), notes


def kinds(rows):
    return sorted((row["backend"], row["phase"]) for row in rows)


def test_every_column_is_timed_with_its_limit():
    blocks, notes = session(words=[*WORDS, "pooling=[2,criteo]"])
    assert list(blocks) == [0, 1]
    assert notes == []
    for rows in blocks.values():
        assert kinds(rows) == sorted(WHOLE + ALONE)
        for row in rows:
            assert row["captured"]
            assert (row["link"], row["gpu"], row["ranks_per_gpu"], row["nccl"]) == ("same-GPU", "stand-in", 2, "2.32.3")
            assert (row["limit_ms"] or 0) > 0 if row["phase"] == "forward" else row["limit_ms"] is None
            assert row["nccl_max_ctas"] in (
                (4, 8, 16, 32) if row["backend"] == "baseline" and "alone" not in row["phase"] else (4, 8, 16, 32, None)
            )


def test_a_backend_with_wrong_results_is_left_out_on_all_ranks():
    blocks, notes = session("wrong_results")
    assert kinds(blocks[0]) == sorted([*WHOLE[:2], *ALONE])
    assert "no rows of unfused forward: rank 1: gives another result than the first backend: up to 1 off" in notes[0]


def test_a_phase_that_fails_is_left_out_with_its_reason():
    blocks, notes = session("failing_backward")
    assert kinds(blocks[0]) == sorted([WHOLE[0], WHOLE[2], *ALONE])
    assert notes == [
        f"no rows of {backend} forward_backward: rank 0: NotImplementedError: no backward here"
        for backend in ("baseline", "unfused")
    ]


def test_what_one_rank_cannot_capture_all_ranks_time_as_plain_calls():
    blocks, _ = session("uncapturable_backward")
    for row in blocks[0]:
        assert row["captured"] == (row["phase"] != "forward_backward")
        if not row["captured"]:
            assert row["why_not_captured"] == "rank 1: RuntimeError: it waits for the device"


def test_nccl_is_not_timed_over_pinned_memory():
    blocks, notes = session(words=[*WORDS, "link=pinned"])
    assert kinds(blocks[0]) == WHOLE[2:]
    assert notes == ["no rows of baseline: NCCL cannot be made to go through pinned host memory"]


def test_all_to_all_is_timed_too():
    blocks, _ = session(words=["op=all_to_all", "kib=[1,4]", *WORDS[:3], "backends=baseline", "rounds=3"])
    assert list(blocks) == [1, 0]
    assert {row["kib"] for row in blocks[1]} == {4}
    assert kinds(blocks[0]) == [("baseline", "forward")]


@pytest.mark.gpu
@pytest.mark.parametrize("link", ["peer", "pinned"])
def test_rows_of_a_gpu(link, tmp_path):
    """Two ranks on the first card, in a lab of the program's own (or in the one that the tests run in)."""
    out = tmp_path / "rows.json"
    shape = ["tables=2", "rows=5000", "dim=64", "pooling=5", "batch=256"]
    words = ["op=embedding_all_to_all", "device=cuda", "ranks=2", "ranks_per_gpu=2", f"link={link}", *shape]
    assert bench.main([*words, "backends=[unfused,cuda]", "rounds=3", f"out={out}"]) == 0
    rows = json.loads(out.read_text())
    assert {row["backend"] for row in rows if row["phase"] == "forward"} == {"unfused", "cuda"}
    assert {row["link"] for row in rows} == {{"peer": "same-GPU", "pinned": "PCIe host"}[link]}
    assert all(row["captured"] for row in rows if row["phase"] == "forward")
    assert all(row["ms"] > 0 for row in rows)
