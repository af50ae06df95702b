import json
import os
import re
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from launch import compare as command
from launch import quickstart
from launch.page.comparison import compare
from launch.page.runs import find_runs, read_run
from tests.fabricated_runs import write_run

PROMISED_KEYS = {
    *("comm", "backend", "ranks", "seed", "steps", "final_loss", "auc", "ne"),
    *("step_ms", "data_ms", "compute_ms", "exposed_comm_ms", "samples_per_s"),
}


class Page(HTMLParser):
    """What a browser would load from elsewhere, and the figures table as {run: {column: text}}."""

    def __init__(self, text):
        super().__init__()
        self.loads, self.table, self._row, self._key, self._style = [], {}, {}, None, False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self._style = tag == "style"
        self.loads += [values[name] for name in ("src", "srcset", "poster", "action") if values.get(name)]
        if tag == "link":
            self.loads.append(values.get("href"))
        if tag == "tr":
            self._row = {}
        self._key = values.get("data-key") if tag == "td" else None

    def handle_data(self, data):
        if self._style:
            self.loads += re.findall(r"url\(([^)]*)\)|@import\s+(\S+)", data)
        if self._key:
            self._row[self._key] = self._row.get(self._key, "") + data

    def handle_endtag(self, tag):
        self._style = False
        if tag == "td":
            self._key = None
        if tag == "tr" and self._row:
            self.table[self._row["label"]] = self._row


def run_command(capsys, tmp_path, *directories):
    """Exit code, terminal text, page and summary of `launch.compare DIRECTORIES --out tmp_path/out`."""
    out = tmp_path / "out"
    code = command.main([*map(str, directories), "--out", str(out)])
    printed = capsys.readouterr()
    if code:
        return code, printed.out + printed.err, None, None
    return code, printed.out, (out / "index.html").read_text(), json.loads((out / "summary.json").read_text())


@pytest.fixture
def pair(tmp_path):
    write_run(tmp_path / "runs" / "baseline", "baseline")
    write_run(tmp_path / "runs" / "fused", "fused")
    return tmp_path / "runs"


def test_table_page_and_summary_say_the_same(capsys, tmp_path, pair):
    code, printed, page, summary = run_command(capsys, tmp_path, pair)
    assert code == 0
    assert [row["comm"] for row in summary] == ["baseline", "fused"]
    assert all(set(row) >= PROMISED_KEYS for row in summary)
    baseline, fused = summary
    reduction = 100 * (1 - fused["step_ms"] / baseline["step_ms"])
    assert fused["step_reduction_percent"] == pytest.approx(reduction)
    assert baseline["step_reduction_percent"] is None
    table = Page(page).table
    assert table["fused"]["step_reduction_percent"] == f"+{reduction:.1f} %"
    for row in summary:
        shown = table[row["label"]]
        assert shown["step_ms"] == f"{row['step_ms']:.2f}"
        assert shown["exposed_comm_ms"] == f"{row['exposed_comm_ms']:.2f}"
        assert shown["samples_per_s"] == f"{row['samples_per_s']:,.0f}"
        assert shown["backend"] == row["backend"] == {"baseline": "baseline", "fused": "host"}[row["comm"]]
        line = next(line for line in printed.splitlines() if line.split()[:2] == [row["label"], row["backend"]])
        terminal = [text for key, text in shown.items() if key not in ("status", "ranks", "seed", "steps")]
        assert line.split() == " ".join(terminal).split()
    assert summary == json.loads(json.dumps(summary), parse_constant=pytest.fail)


def test_long_lists_do_not_fill_the_table(capsys, tmp_path, pair):
    for name, first in (("baseline", 7), ("fused", 9)):
        path = pair / name / "config.yaml"
        config = yaml.safe_load(path.read_text())
        config["model"]["table_rows"] = [first, *range(26)]
        path.write_text(yaml.safe_dump(config))
    _, _, _, summary = run_command(capsys, tmp_path, pair)
    assert [row["label"] for row in summary] == [
        "baseline, table_rows=[7, ... 27 values]",
        "fused, table_rows=[9, ... 27 values]",
    ]


def test_charts_hold_the_runs_own_numbers(capsys, tmp_path, pair):
    _, _, page, summary = run_command(capsys, tmp_path, pair)
    charts = dict(re.findall(r'<script type="application/json" id="(\w+)-data">(.*?)</script>', page, re.DOTALL))
    lines = {trace["name"]: trace for trace in json.loads(charts["losses"])["data"]}
    run = read_run(pair / "fused")
    assert lines["fused"]["x"] == [event["step"] for event in run.train]
    assert lines["fused"]["y"] == [event["loss"] for event in run.train]
    assert lines["baseline"]["line"]["width"] > 3 * lines["fused"]["line"]["width"]  # both stay visible
    bars = {trace["name"]: trace for trace in json.loads(charts["steps"])["data"] if trace["type"] == "bar"}
    assert bars["exposed communication"]["y"] == ["fused", "baseline"]
    assert bars["exposed communication"]["x"] == [row["exposed_comm_ms"] for row in reversed(summary)]


def test_the_page_loads_nothing(capsys, tmp_path, pair):
    _, _, page, _ = run_command(capsys, tmp_path, pair)
    assert Page(page).loads == ["data:,"]
    assert "plotly.js v" in page[:2_000_000]  # its source is inside


def test_the_self_containedness_check_sees_loads():
    seen = Page(
        '<script src="https://x/y.js"></script><link href="a.css"><style>b{background:url(z.png)}</style>'
    ).loads
    assert len(seen) == 3


def test_text_from_runs_is_escaped(capsys, tmp_path):
    write_run(tmp_path / "a", "fused", status="failed", reason="</script><script>alert(1)</script> [bold]")
    _, printed, page, _ = run_command(capsys, tmp_path, tmp_path / "a")
    assert "<script>alert" not in page
    assert "[bold]" in printed


def test_equal_losses_and_different_ones(tmp_path):
    write_run(tmp_path / "a", "baseline")
    write_run(tmp_path / "b", "fused")
    write_run(tmp_path / "c", "fused", loss_offset=1e-3)
    baseline, same, other = compare(find_runs([tmp_path])).rows
    assert (same.early_loss_difference, same.loss_difference) == (0.0, 0.0)
    assert other.early_loss_difference == pytest.approx(1e-3 / 0.6, rel=0.3)
    assert baseline.loss_difference is None
    warnings = compare(find_runs([tmp_path])).warnings
    assert len([text for text in warnings if "losses differ" in text and "fused (c)" in text]) == 1


def test_no_runs(capsys, tmp_path):
    (tmp_path / "empty").mkdir()
    code, printed, _, _ = run_command(capsys, tmp_path, tmp_path / "empty", tmp_path / "nowhere")
    assert code == 1
    assert "nowhere is not a directory" in printed
    assert "no summary.json or metrics.jsonl in" in printed
    assert "no page was written" in printed
    assert not (tmp_path / "out").exists()


def test_no_arguments(capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main([])
    assert stopped.value.code == 2
    assert "name at least one run or sweep directory" in capsys.readouterr().err


def test_one_run_and_no_baseline(capsys, tmp_path):
    write_run(tmp_path / "only", "fused")
    code, printed, page, summary = run_command(capsys, tmp_path, tmp_path / "only")
    assert code == 0
    assert "There is no pair to compare" in page
    assert "no baseline run was given" in printed
    assert summary[0]["step_reduction_percent"] is None


def test_the_nearest_baseline_is_named_when_none_matches(tmp_path):
    write_run(tmp_path / "0", "baseline", lr=0.1, seed=3)
    write_run(tmp_path / "1", "baseline", lr=0.1)
    write_run(tmp_path / "2", "fused", lr=0.05)
    (row,) = [row for row in compare(find_runs([tmp_path])).rows if not row.is_baseline]
    assert row.no_baseline == "no matching baseline; the nearest, 1, differs in optim.lr"
    assert row.step_reduction is None


def test_runs_on_other_numbers_of_ranks_do_not_match(tmp_path):
    write_run(tmp_path / "a", "baseline", ranks=4)
    write_run(tmp_path / "b", "fused", ranks=2)
    assert compare(find_runs([tmp_path])).rows[1].no_baseline.endswith("differs in ranks")


def test_a_sweep_pairs_each_run_with_its_own_baseline(capsys, tmp_path):
    sweep = tmp_path / "sweep"
    for index, (comm, lr, scale) in enumerate(
        [("baseline", 0.1, 1.0), ("baseline", 0.05, 2.0), ("fused", 0.1, 1.0), ("fused", 0.05, 1.0)]
    ):
        write_run(sweep / str(index), comm, lr=lr, scale=scale)
    (sweep / "multirun.yaml").touch()
    code, _, page, summary = run_command(capsys, tmp_path, sweep)
    assert code == 0
    rows = {row["label"]: row for row in summary}
    assert rows["fused, lr=0.1"]["baselines"] == ["0"]
    assert rows["fused, lr=0.05"]["baselines"] == ["1"]
    assert rows["fused, lr=0.05"]["step_reduction_percent"] > rows["fused, lr=0.1"]["step_reduction_percent"] + 20
    assert "Over 2 pairs" in page
    assert "<code>optim.lr</code>" in page


def test_failed_missing_unfinished_and_unreadable_runs_are_named(capsys, tmp_path):
    runs = tmp_path / "runs"
    write_run(runs / "0", "baseline")
    write_run(runs / "1", "fused", status="failed", reason="PeerLostError: rank 1 died")
    write_run(runs / "2", "fused", seed=5, finished=False)
    write_run(runs / "3", "fused", seed=6)
    (runs / "3" / "summary.json").write_text("{")
    (runs / "4").mkdir()
    (runs / "4" / "train.log").write_text("unknown key")
    code, printed, page, summary = run_command(capsys, tmp_path, runs, tmp_path / "gone")
    assert code == 0
    found = {row["name"]: row for row in summary}
    assert {name: row["status"] for name, row in found.items()} == {
        "runs/0": "ok",
        "runs/1": "failed",
        "runs/2": "unfinished",
        "runs/3": "unreadable",
        "runs/4": "failed",
        "gone": "missing",
    }
    assert found["runs/1"]["step_ms"] is not None
    assert found["runs/1"]["step_reduction_percent"] is None  # a failed run proves no gain
    assert found["runs/2"]["steps"] == 60
    for text in (
        "PeerLostError: rank 1 died",
        "still running, or killed",
        "JSONDecodeError",
        "ended before its first record",
    ):
        assert text in printed
        assert text in page
    assert len(Page(page).table) == 6


def test_a_failed_baseline_is_no_reference(tmp_path):
    write_run(tmp_path / "a", "baseline", status="failed", reason="killed")
    write_run(tmp_path / "b", "fused")
    assert compare(find_runs([tmp_path])).rows[1].no_baseline == "its baseline a is failed or has no step time"


def test_nan(capsys, tmp_path):
    write_run(tmp_path / "a", "baseline")
    write_run(tmp_path / "b", "fused", nan_from=30, status="failed", reason="non-finite loss at step 30")
    code, printed, page, summary = run_command(capsys, tmp_path, tmp_path)
    assert code == 0
    assert Page(page).table["fused"]["final_loss"] == "nan"
    assert (summary[1]["final_loss"], summary[1]["non_finite"]) == (None, {"final_loss": "nan"})
    assert summary[1]["early_loss_difference"] == 0.0
    assert "non-finite loss at step 30" in printed


def test_an_unfused_run_is_called_so(tmp_path):
    runs = [write_run(tmp_path / "b", "baseline", backend="baseline")]
    runs += [write_run(tmp_path / backend, "fused", backend=backend) for backend in ("host", "unfused")]
    comparison = compare(find_runs(runs))
    assert sorted(row.label for row in comparison.rows) == ["baseline", "fused", "unfused"]


def test_fused_that_ran_on_baseline_is_a_warning(tmp_path):
    counter = {"operator": "embedding_all_to_all", "backend": "baseline", "reason": "group spans hosts", "calls": 9}
    write_run(tmp_path / "a", "fused", backend="baseline", counters=[counter])
    warnings = compare(find_runs([tmp_path])).warnings
    assert "fused: fused was asked for and baseline ran: group spans hosts" in warnings


@pytest.mark.parametrize(("warnings", "expected"), [([], "AUC is 0.5"), (["AUC is 0.5: one class"], "one class")])
def test_a_degenerate_auc_is_flagged_once(tmp_path, warnings, expected):
    path = write_run(tmp_path / "a", "baseline", warnings=warnings)
    summary = json.loads((path / "summary.json").read_text()) | {"auc": 0.5001}
    (path / "summary.json").write_text(json.dumps(summary))
    flagged = [text for text in compare(find_runs([path])).warnings if "AUC" in text]
    assert len(flagged) == 1
    assert expected in flagged[0]


def test_a_difference_within_the_spread_is_marked(capsys, tmp_path):
    write_run(tmp_path / "a", "baseline")
    write_run(tmp_path / "b", "fused", scale=1.45)
    _, _, page, summary = run_command(capsys, tmp_path, tmp_path)
    assert summary[1]["within_spread"] is True
    assert Page(page).table["fused"]["step_reduction_percent"].endswith("~")
    assert "The spread of single steps is wider than this difference." in page


def test_a_slower_fused_run_is_said_to_be_slower(capsys, tmp_path):
    write_run(tmp_path / "a", "baseline")
    write_run(tmp_path / "b", "fused", scale=3.0)
    _, _, page, summary = run_command(capsys, tmp_path, tmp_path)
    assert summary[1]["step_reduction_percent"] < -50
    assert "% longer with fused" in page


def test_several_baselines_give_the_median(tmp_path):
    for name, scale in (("a", 1.0), ("b", 9.0), ("c", 1.0)):
        write_run(tmp_path / name, "baseline", scale=scale)
    write_run(tmp_path / "d", "fused")
    row = compare(find_runs([tmp_path])).rows[-1]
    assert len(row.baselines) == 3
    assert 20 < row.step_reduction < 45


def test_an_own_output_directory_is_not_taken_for_a_run(capsys, tmp_path):
    out = tmp_path / "out"
    write_run(out / "runs" / "baseline", "baseline")
    write_run(out / "runs" / "fused", "fused")
    run_command(capsys, tmp_path, out / "runs")
    assert [run.name for run in find_runs([out])] == ["baseline", "fused"]
    assert len(find_runs([out, out / "runs" / "fused"])) == 2  # named twice, shown once


def test_a_narrow_terminal_gets_two_tables(tmp_path, pair):
    def lines(width):
        console = Console(width=width, force_terminal=True, record=True, file=(tmp_path / "sink").open("w"))
        command.print_table(compare(find_runs([pair])), console)
        return [line for line in console.export_text().splitlines() if line.split()[:1] == ["fused"]]

    assert len(lines(140)) == 1
    assert len(lines(80)) == 2
    assert all(len(line) <= 80 and "…" not in line for line in lines(80))


def test_quickstart_trains_both_modes_and_writes_the_page(monkeypatch, capfd, tmp_path):
    def fabricate(mode, ranks, directory, overrides):
        code = "import sys; from pathlib import Path; from tests.fabricated_runs import write_run as w; "
        return [sys.executable, "-c", code + f"w(Path(sys.argv[1]), {mode!r}, ranks={ranks})", str(directory)]

    monkeypatch.setattr(quickstart, "train_command", fabricate)
    for _ in range(2):  # a second time next to the first
        assert command.main(["--quickstart", "--ranks", "2", "--out", str(tmp_path / "out")]) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [row["comm"] for row in summary] == ["baseline", "fused"]
    assert len(list((tmp_path / "out" / "runs").iterdir())) == 2


def test_an_interrupted_quickstart_waits_for_its_job(tmp_path):
    done = tmp_path / "done"
    job = f"import time\ntry: time.sleep(60)\nexcept KeyboardInterrupt: time.sleep(1); open({str(done)!r}, 'w')"
    code = (
        "import sys; from launch import compare, quickstart\n"
        f"quickstart.train_command = lambda *_: [sys.executable, '-c', {job!r}]\n"
        f"sys.exit(compare.main(['--quickstart', 'a=1', '--out', {str(tmp_path / 'out')!r}, 'b=2']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    process.stdout.readline()  # an empty line
    process.stdout.readline()  # the command, just before it starts
    time.sleep(1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.endswith("launch.compare: interrupted\n")
    assert done.exists()


def test_quickstart_stops_at_a_run_that_fails(monkeypatch, capfd, tmp_path):
    monkeypatch.setattr(quickstart, "train_command", lambda *_: [sys.executable, "-c", "raise SystemExit(3)"])
    assert command.main(["--quickstart", "--out", str(tmp_path)]) == 1
    assert "the baseline run failed with exit code 3" in capfd.readouterr().err
    assert not (tmp_path / "index.html").exists()


def test_quickstart_command_line():
    line = quickstart.train_command("fused", 2, Path("/o/fused"), ["trainer.steps=5"])
    assert " ".join(line[1:]) == (
        "-m torch.distributed.run --standalone --nproc-per-node=2 -m launch.train "
        "comm=fused hydra.run.dir=/o/fused trainer.steps=5"
    )


@pytest.mark.parametrize("arguments", [["--ranks", "0"], ["--quickstart", "some_dir"]])
def test_bad_usage(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main([*arguments])
    assert stopped.value.code == 2


def test_fresh_directories_are_never_shared(tmp_path):
    assert len({quickstart.fresh_directory(tmp_path) for _ in range(20)}) == 20
