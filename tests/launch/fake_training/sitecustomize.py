"""With this directory on PYTHONPATH, `trainers.run.run` is a stand-in that trains nothing.

`logger.tags` says how it ends. Tests of the command line and of sweeps start real processes with it; the command line
itself is the real one.
"""

import sys
import time
import types
from pathlib import Path


def run(config, rank, world):
    Path(config.run_dir, f"rank_{rank}_of_{world}").touch()
    if "fail" in config.logger.tags:
        raise RuntimeError("asked to fail")
    if "hang" in config.logger.tags:
        time.sleep(600)
    print(f"trained on rank {rank}")
    return {"status": "ok", "reason": None}


stand_in = types.ModuleType("trainers.run")
stand_in.run = run
sys.modules["trainers.run"] = stand_in
