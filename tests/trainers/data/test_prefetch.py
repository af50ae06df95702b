import gc
import itertools
import subprocess
import sys
import threading
import time

import pytest

from trainers.data.prefetch import Prefetch


def threads() -> int:
    return sum(thread.name == "prefetch" for thread in threading.enumerate())


def test_yields_all_and_ends():
    prefetch = Prefetch(iter(range(50)))
    assert list(prefetch) == list(range(50))
    with pytest.raises(StopIteration):
        next(prefetch)
    assert threads() == 0


def test_reads_ahead_but_not_far():
    made = []
    prefetch = Prefetch((made.append(i) or i for i in itertools.count()), ahead=2)
    assert next(prefetch) == 0
    deadline = time.monotonic() + 5
    while len(made) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert made == [0, 1, 2, 3]  # one taken, two waiting, one in hand
    prefetch.close()


def test_error_comes_in_its_place():
    def source():
        yield 1
        raise KeyError("lost")

    prefetch = Prefetch(source())
    assert next(prefetch) == 1
    with pytest.raises(KeyError, match="lost"):
        next(prefetch)
    assert threads() == 0


def test_forgotten_iterator_ends_its_thread():
    prefetch = Prefetch(itertools.count())
    next(prefetch)
    assert threads() == 1
    del prefetch
    gc.collect()
    assert threads() == 0


def test_exit_in_the_middle_is_clean():
    script = (
        "import itertools, torch; from trainers.data.prefetch import Prefetch\n"
        "p = Prefetch(torch.ones(9) * i for i in itertools.count()); next(p)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
