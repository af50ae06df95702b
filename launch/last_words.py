"""The line that says why a process of `launch.train`, or another program here, stops: for people, torchrun and sweeps."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path

PROGRAM = "launch.train: "
_LINE = re.compile("^" + re.escape(PROGRAM) + r"(?:error: )?(.+)", re.MULTILINE)


def say(reason: str, details: str = "") -> None:
    """Prints the line, then the details, on stderr, and leaves the line to torchrun where it runs this process."""
    print(f"{PROGRAM}{reason}{details and chr(10) + details}", file=sys.stderr, flush=True)
    if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # torchrun's own report, the last thing on the screen, then gives the reason beside the exit code.
        Path(report).write_text(json.dumps({"message": reason, "timestamp": int(time.time())}))


def find(log: str) -> str | None:
    """The first such line in a log, without its prefix."""
    match = _LINE.search(log)
    return match[1] if match else None
