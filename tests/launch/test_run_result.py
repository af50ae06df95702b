from launch.run_result import in_one_line


def test_what_is_known_is_said_and_null_is_not():
    summary = {
        "steps": 300,
        "final_loss": 0.41657,
        "auc": None,
        "step_ms": 35.344,
        "backend": "host",
        "warnings": ["w"],
    }
    assert in_one_line(summary) == "trained to step 300: loss 0.4166, 35.34 ms a step, backend host\nwarning: w"
    assert in_one_line({"steps": 0}) == "trained to step 0: no figures"
