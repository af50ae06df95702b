"""The operator benchmark: settings are checked, and a small run on two ranks writes complete, plausible rows."""

import json

import pytest

from launch.bench import __main__ as bench
from launch.bench.settings import SettingsError, parse, shapes

ROW_FIELDS = {"op", "backend", "device", "link", "ranks", "dtype", "phase", "ms", "limit_ms", "torch", "fusecomm"}
SMALL = ["ranks=2", "rounds=1", "iterations=2", "warmup=1", "rotate=2"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["poling=3"], "unknown key 'poling' .did you mean 'pooling'"),
        (["pooling"], "expected key=value"),
        (["op=gemm"], "op must be one of all_to_all, embedding_all_to_all"),
        (["ranks=two"], "ranks"),
        (["ranks=0"], "ranks must be at least 1"),
        (["pooling=[1,-2]"], "pooling must be a whole number from 0 up"),
        (["dtype=bf16"], "no baseline to time"),
        (["device=cuda"], "device must be one of cpu"),
    ],
)
def test_bad_settings_are_one_clear_line(words, message, capsys):
    with pytest.raises(SettingsError, match=message):
        parse(words)
    assert bench.main(words) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_lists_are_swept():
    swept = list(shapes(parse(["pooling=[1,20]", "dim=[16,64,128]"])))
    assert [(s["pooling"], s["dim"]) for s in swept] == [(p, d) for d in (16, 64, 128) for p in (1, 20)]


def test_embedding_rows(tmp_path, capsys):
    out = tmp_path / "rows.json"
    assert (
        bench.main(
            ["op=embedding_all_to_all", "tables=2", "rows=500", "dim=16", "pooling=3", "batch=65", *SMALL, f"out={out}"]
        )
        == 0
    )
    rows = json.loads(out.read_text())
    timed = {(row["backend"], row["phase"]) for row in rows}
    assert timed == {
        *((b, p) for b in ("baseline", "unfused", "host") for p in ("forward", "forward_backward")),
        *((b, p) for b in ("baseline", "host") for p in ("compute_alone", "exchange_alone")),
    }
    for row in rows:
        assert row.keys() >= ROW_FIELDS | {"tables_per_rank", "rows", "dim", "pooling", "batch"}
        assert row["p10_ms"] <= row["ms"] <= row["p90_ms"]
        assert row["ms"] > 0
    assert all(row["limit_ms"] > 0 for row in rows if row["phase"] == "forward")
    assert "/ baseline" in capsys.readouterr().out


def test_all_to_all_rows(tmp_path):
    out = tmp_path / "rows.json"
    assert bench.main(["op=all_to_all", "kib=[1,8]", *SMALL, f"out={out}"]) == 0
    rows = json.loads(out.read_text())
    assert [(r["kib"], r["backend"]) for r in rows] == [(k, b) for k in (1, 8) for b in ("baseline", "host")]
