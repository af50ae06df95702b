import json

import pytest

from launch import wandb_report
from trainers.loggers.wandb_logger import STEP_METRIC
from trainers.run_summary import TIMINGS


@pytest.fixture(autouse=True)
def _no_credentials(monkeypatch, tmp_path):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_IDENTITY_TOKEN_FILE", raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://192.0.2.1")  # reserved for documentation: whoever asks it waits
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def panels(spec):
    grids = [block for block in spec["blocks"] if block["type"] == "panel-grid"]
    return [panel for grid in grids for panel in grid["metadata"]["panelBankSectionConfig"]["panels"]]


def test_the_report_sets_fused_against_baseline():
    spec = wandb_report.spec(wandb_report.build_report("team", "fusecomm", "lr_sweep"))
    found = panels(spec)
    lines = {panel["config"]["metrics"][0]: panel["config"] for panel in found if "Line" in panel["viewType"]}
    quality = {"train/loss", "eval/auc", "eval/ne", "eval/perplexity"}
    assert set(lines) == {*quality, "train/step_ms", "train/exposed_comm_ms"}
    assert {config["xAxis"] for config in lines.values()} == {STEP_METRIC}
    bars = {panel["config"]["metrics"][0] for panel in found if "Bar" in panel["viewType"]}
    ends = {"summary/samples_per_s", "summary/tokens_per_s", "summary/auc", "summary/perplexity"}
    assert bars == {*(f"summary/{key}" for key in TIMINGS), *ends}
    assert {panel["config"]["groupBy"] for panel in found} == {"comm.value.mode"}


def test_runs_are_grouped_by_comm_and_kept_to_the_sweep():
    for group, filters in (("lr_sweep", [("group", "lr_sweep")]), (None, [])):
        spec = wandb_report.spec(wandb_report.build_report("team", "fusecomm", group))
        sets = [item for block in spec["blocks"] if "metadata" in block for item in block["metadata"]["runSets"]]
        assert len(sets) == 2
        for item in sets:
            assert item["grouping"] == [{"section": "config", "name": "comm.value.mode"}]
            assert [(each["key"]["name"], each["value"]) for each in item["filters"]["filters"]] == filters


def test_panels_do_not_overlap():
    spec = wandb_report.spec(wandb_report.build_report("team", "fusecomm"))
    for block in spec["blocks"]:
        if block["type"] != "panel-grid":
            continue
        taken = set()
        for panel in block["metadata"]["panelBankSectionConfig"]["panels"]:
            place = panel["layout"]
            columns = range(place["x"], place["x"] + place["w"])
            cells = {(x, y) for x in columns for y in range(place["y"], place["y"] + place["h"])}
            assert not cells & taken
            taken |= cells


def test_building_needs_no_key_and_writes_the_definition(tmp_path, capsys):
    path = tmp_path / "sub" / "report.json"
    assert wandb_report.main(["--entity", "team", "--out", str(path)]) == 0
    assert len(panels(json.loads(path.read_text()))) == 15
    assert "nothing was sent" in capsys.readouterr().out


def test_saving_without_a_key_is_one_clear_error(capsys):
    assert wandb_report.main(["--entity", "team", "--save"]) == 1
    assert "--save needs a W&B key" in capsys.readouterr().err


def test_saving_sends_the_report(monkeypatch, capsys):
    saved = []
    monkeypatch.setattr(wandb_report, "has_key", lambda: True)
    monkeypatch.setattr(wandb_report.wr.Report, "save", lambda report: saved.append(report.title))
    monkeypatch.setattr(wandb_report.wr.Report, "url", "https://example.org/report")
    assert wandb_report.main(["--entity", "team", "--group", "lr_sweep", "--save"]) == 0
    assert saved == ["Fused against baseline: lr_sweep"]
    assert "https://example.org/report" in capsys.readouterr().out
