"""The permanent stress test of `fused_ops.all_to_all`; see tests/stress/driver.py for its options."""

import sys

from tests.stress.driver import main

if __name__ == "__main__":
    sys.exit(main("all_to_all"))
