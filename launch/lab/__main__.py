"""Runs a command in a one-GPU lab, and ends the lab with it.

    python -m launch.lab ranks_per_gpu=4 [nccl=PATH] [mps=off] -- COMMAND...

A command that uses NCCL needs one that lets ranks share a card: torch's own from 2.30 on, or the one at PATH (or FUSECOMM_NCCL).
Exit code: the command's; 2 where the lab lacks something.
"""

from __future__ import annotations

import signal
import subprocess
import sys

from launch.lab import LabError, OneGpuLab, nccl

KEYS = ("ranks_per_gpu", "nccl", "mps")
GRACE_S = 20.0


def main(words: list[str]) -> int:
    try:
        options, command = _split(words)
        named = nccl.chosen(options.get("nccl"))
        lab = OneGpuLab(
            int(options["ranks_per_gpu"]),
            nccl_path=named,
            use_mps=options.get("mps", "on") == "on",
            needs_nccl=named is not None,  # the command may do without
        )
    except LabError as error:
        print(f"launch.lab: {error}", file=sys.stderr)
        return 2
    with lab:
        return _run(command)


def _split(words: list[str]) -> tuple[dict[str, str], list[str]]:
    if "--" not in words or words[-1] == "--":
        raise LabError("expected ranks_per_gpu=N -- COMMAND...")
    at = words.index("--")
    options = dict(word.partition("=")[::2] for word in words[:at])
    unknown = [key for key in options if key not in KEYS]
    if unknown:
        raise LabError(f"unknown key '{unknown[0]}'; keys: {', '.join(KEYS)}")
    ranks = options.get("ranks_per_gpu", "")
    if not ranks.isdecimal() or int(ranks) < 2:
        raise LabError(f"ranks_per_gpu must be a whole number from 2 up, got '{ranks}'")
    if options.get("mps", "on") not in ("on", "off"):
        raise LabError(f"mps must be on or off, got '{options['mps']}'")
    return options, words[at + 1 :]


def _run(command: list[str]) -> int:
    """The command's exit code. A signal that ends this program is passed on first."""
    try:
        process = subprocess.Popen(command)
    except OSError as error:
        print(f"launch.lab: {command[0]}: {error.strerror}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        return process.wait()
    except KeyboardInterrupt:  # the command got it too
        try:
            return process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
