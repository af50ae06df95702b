import json
import signal
import subprocess
import sys
import time

import pytest

from trainers.loggers.jsonl import FILE_NAME, JsonlLogger, read_events, surviving


def train(step, loss=0.5):
    return {"event": "train", "step": step, "loss": loss}


def test_records_are_on_disk_while_the_run_is_alive(tmp_path):
    logger = JsonlLogger(tmp_path)
    logger.start({"model": {"name": "tiny"}})
    logger.log(train(1))
    events = read_events(tmp_path / FILE_NAME)  # the logger still has the file open
    assert [event["event"] for event in events] == ["start", "train"]
    assert events[0]["config"] == {"model": {"name": "tiny"}}
    assert abs(events[1]["time"] - time.time()) < 60
    logger.finish("ok")
    assert read_events(tmp_path / FILE_NAME)[-1]["status"] == "ok"


def test_resume_appends(tmp_path):
    for steps, run_id in (((1, 2), None), ((3, 4), "abc")):
        logger = JsonlLogger(tmp_path)
        logger.start({}, run_id)
        for step in steps:
            logger.log(train(step))
        logger.finish("failed", "stopped by hand")
    events = read_events(tmp_path / FILE_NAME)
    assert [event.get("step") for event in events if event["event"] == "train"] == [1, 2, 3, 4]
    assert [event["wandb_id"] for event in events if event["event"] == "start"] == [None, "abc"]


def test_resume_after_a_torn_record(tmp_path):
    path = tmp_path / FILE_NAME
    path.write_text(json.dumps(train(1)) + "\n" + '{"event": "train", "st')
    assert [event["step"] for event in read_events(path)] == [1]
    logger = JsonlLogger(tmp_path)
    logger.start({})
    logger.log(train(2))
    logger.finish("ok")
    assert [event["step"] for event in read_events(path) if event["event"] == "train"] == [1, 2]


def test_a_torn_record_longer_than_a_block(tmp_path):
    path = tmp_path / FILE_NAME
    path.write_text(json.dumps(train(1)) + "\n" + "x" * 200_000)
    JsonlLogger(tmp_path).start({})
    assert [event["event"] for event in read_events(path)] == ["train", "start"]


def test_a_killed_process_leaves_every_record_it_logged(tmp_path):
    code = (
        "import sys, time; from trainers.loggers.jsonl import JsonlLogger\n"
        "logger = JsonlLogger(sys.argv[1]); logger.start({})\n"
        "for step in range(1, 101): logger.log({'event': 'train', 'step': step, 'loss': 1.0})\n"
        "print('logged', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "logged\n"
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
    process.stdout.close()
    assert [event["step"] for event in read_events(tmp_path / FILE_NAME) if "step" in event] == list(range(1, 101))


def test_a_broken_line_is_named(tmp_path):
    path = tmp_path / FILE_NAME
    path.write_text(json.dumps(train(1)) + "\nrubbish\n")
    with pytest.raises(ValueError, match=rf"{FILE_NAME}, line 2: "):
        read_events(path)


def test_logging_outside_a_run_is_an_error(tmp_path):
    logger = JsonlLogger(tmp_path)
    with pytest.raises(RuntimeError, match="before start"):
        logger.log(train(1))
    logger.finish("ok")  # nothing to finish, nothing written
    assert not (tmp_path / FILE_NAME).exists()


def test_steps_written_twice_count_once():
    first = [
        train(1, 0.9),
        train(2, 0.8),
        {"event": "eval", "step": 2},
        train(3, 0.7),
        train(4, 0.6),
        {"event": "eval", "step": 4},
    ]
    resumed = [{"event": "start"}, train(3, 0.65)]
    kept = surviving([*first, *resumed])
    assert [(event["event"], event["step"], event.get("loss")) for event in kept] == [
        ("train", 1, 0.9),
        ("train", 2, 0.8),
        ("eval", 2, None),
        ("train", 3, 0.65),
    ]
