"""The permanent stress test of the GEMM operators; see tests/stress/driver.py for its options."""

import sys

from tests.stress.driver import main

if __name__ == "__main__":
    sys.exit(main("gemm"))
