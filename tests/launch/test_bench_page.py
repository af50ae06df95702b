"""The results page: every figure of it comes from the rows."""

import json
import re

import pytest

from launch.bench_page.__main__ import main
from launch.bench_page.render import ms
from launch.bench_page.results import Cell, machine, sections

SHAPE = {
    "tables_per_rank": 8,
    "rows": 1000,
    "dim": 128,
    "pooling": 20,
    "batch": 8192,
    "dtype": "fp32",
    "optimizer": "sgd",
}
RUN = {
    "op": "embedding_all_to_all",
    "device": "cuda",
    "gpu": "NVIDIA H200",
    "ranks": 4,
    "ranks_per_gpu": 4,
    "mps": "private",
    "link": "same-GPU",
    "graph": True,
    "commit": "abc1234",
    "torch": "2.11.0",
    "command": "bench it",
}
TIMES = {
    ("cuda", "forward"): 0.8,
    ("triton", "forward"): 1.0,
    ("baseline", "forward"): 1.6,
    ("unfused", "forward"): 1.0,
    ("cuda", "compute_alone"): 0.6,
    ("baseline", "exchange_alone"): 0.3,
    ("cuda", "forward_backward"): 3.0,
    ("baseline", "forward_backward"): 6.0,
}


def rows(name="t8", times=TIMES, **changed):
    return [
        {
            **RUN,
            **SHAPE,
            "configuration": name,
            "backend": backend,
            "phase": phase,
            "ms": time,
            "captured": True,
            "limit_ms": 0.5 if phase == "forward" else None,
            "kernels": "fbgemm" if backend == "baseline" else None,
            **changed,
        }
        for (backend, phase), time in times.items()
    ]


def test_ratios_of_both_phases():
    [section] = sections(rows())
    assert section.title == "embedding_all_to_all: one H200, 4 ranks under MPS, same-GPU"
    forward, whole = section.tables
    assert [c.heading for c in forward.columns] == [
        *("fused (cuda)", "fused (triton)", "FBGEMM + NCCL", "unfused", "lookups alone", "NCCL alone"),
    ]
    assert forward.ratio_headings == [
        "cuda / triton",
        "fused / FBGEMM + NCCL",
        "fused / unfused",
        "fused / limit",
    ]
    assert forward.lines[0].ratios == pytest.approx([0.8, 0.5, 0.8, 1.6])
    assert forward.lines[0].limit_ms == 0.5
    assert whole.ratio_headings == ["fused / FBGEMM + NCCL"]
    assert whole.lines[0].ratios == [0.5]
    assert not whole.has_limit


def test_one_section_a_link_and_number_of_ranks_one_line_a_shape():
    found = sections(
        [*rows("a"), *rows("b", ms=4.0), *rows("a", link="PCIe host"), *rows("a", ranks=2, ranks_per_gpu=2)]
    )
    assert [section.title.partition(": ")[2] for section in found] == [
        "one H200, 4 ranks under MPS, same-GPU",
        "one H200, 4 ranks under MPS, PCIe host",
        "one H200, 2 ranks under MPS, same-GPU",
    ]
    forward = found[0].tables[0]
    assert [line.name for line in forward.lines] == ["a", "b"]
    assert forward.spread("fused / unfused") == pytest.approx((0.8, 0.9, 1.0))


def test_what_was_not_measured_is_not_made_up():
    partial = {key: time for key, time in TIMES.items() if key != ("baseline", "forward")}
    [section] = sections([*rows("whole"), *rows("partial", partial)])
    line = section.tables[0].lines[1]
    assert line.cells[2] is None
    assert line.ratios == [pytest.approx(0.8), None, pytest.approx(0.8), pytest.approx(1.6)]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"mps": "off"}, "one H200, 4 ranks taking turns, without MPS"),
        ({"mps": "none", "ranks_per_gpu": 1}, "4 H200, 4 ranks"),
        ({"gpu": None}, "4 CPU processes"),
    ],
)
def test_the_machine_is_named_as_it_was_used(changed, said):
    assert machine({**RUN, **changed}) == said


def test_what_ran_otherwise_is_marked():
    [section] = sections([*rows("a", captured=False, kernels="torch")])
    [line] = section.tables[0].lines
    assert line.cells[0] == Cell(0.8, "†‡")
    assert [mark[0] for mark in section.tables[0].marks] == ["†", "‡"]
    assert sections(rows())[0].tables[0].marks == []


def test_three_significant_digits():
    assert [ms(value) for value in (0.04567, 0.4567, 4.567, 45.67, 456.7, 4567.0, None)] == [
        *("0.0457", "0.457", "4.57", "45.7", "457", "4567", "-"),
    ]
    assert ms(Cell(1.0, "†")) == "1.00†"


def test_pages_are_written_from_files(tmp_path, capsys):
    source = tmp_path / "rows.json"
    source.write_text(json.dumps(rows("<t8>")))
    assert main([str(source), "--out", str(tmp_path / "deep" / "page.html")]) == 0
    page = (tmp_path / "deep" / "page.html").read_text()
    assert "&lt;t8&gt;" in page
    assert "../rows.json" in page
    assert not re.search(r"(src|href)=\"(?!data:)", page)  # needs no other file
    assert main([str(source), "--out", str(tmp_path / "page.md")]) == 0
    text = (tmp_path / "page.md").read_text()
    assert "| <t8> | 0.800 | 1.00 | 1.60 | 1.00 | 0.600 | 0.300 | 0.500 | 0.80 | 0.50 | 0.80 | 1.60 |" in text
    assert "- fused / FBGEMM + NCCL: median 0.50 (0.50 to 0.50)" in text
    assert "commit abc1234" in text
    assert "`bench it`" in text


@pytest.mark.parametrize("content", ["not json", "[]", '[{"a": 1}]', "{}"])
def test_files_that_are_no_rows_are_one_line(content, tmp_path, capsys):
    source = tmp_path / "rows.json"
    source.write_text(content)
    assert main([str(source), "--out", str(tmp_path / "page.md")]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert not (tmp_path / "page.md").exists()


def test_the_suffix_must_be_known(tmp_path):
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--out", "page.pdf"])


GEMM_TIMES = {
    ("cuda", "forward"): 0.8,
    ("baseline", "forward"): 1.0,
    ("baseline_one_shot", "forward"): 1.6,
    ("auto", "forward"): 0.88,
    ("cuda", "compute_alone"): 0.6,
    ("cuda", "forward_backward"): 3.0,
    ("baseline", "forward_backward"): 6.0,
}


def test_gemm_operators_have_their_rivals_and_auto_is_held_against_the_best():
    shape = {"tables_per_rank": None, "rows": None, "m": 8, "n": 4096, "k": 8192, "op": "gemm_all_reduce"}
    (section,) = sections(rows(name=None, times=GEMM_TIMES, **shape))
    forward, backward = section.tables
    assert backward.title == "Forward and backward"
    headings = [column.heading for column in forward.columns]
    assert headings == ["fused (cuda)", "cuBLAS + NCCL", "cuBLAS + one-shot", "auto", "GEMM alone"]
    (line,) = forward.lines
    assert line.name == "M 8, N 4096, K 8192, fp32"
    ratios = dict(zip(forward.ratio_headings, line.ratios, strict=True))
    assert ratios == pytest.approx(
        {"fused / cuBLAS + NCCL": 0.8, "fused / cuBLAS + one-shot": 0.5, "auto / best": 1.1, "fused / limit": 1.6}
    )
    assert dict(zip(backward.ratio_headings, backward.lines[0].ratios, strict=True)) == {"fused / cuBLAS + NCCL": 0.5}
