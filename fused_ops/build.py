"""Compile the native libraries ahead of time.

python -m fused_ops.build host
python -m fused_ops.build sm_80 sm_90a
"""

from __future__ import annotations

import sys

from fused_ops.compiler import build_cuda_library, build_host_library
from fused_ops.errors import BackendUnavailableError


def main(targets: list[str]) -> None:
    wrong = [t for t in targets if t != "host" and not t.startswith("sm_")]
    if not targets or wrong:
        sys.exit(
            f"usage: python -m fused_ops.build host | ARCH...   (ARCH such as sm_80, sm_90a; got {wrong or 'nothing'})"
        )
    try:
        for target in targets:
            print(build_host_library() if target == "host" else build_cuda_library(target))
    except BackendUnavailableError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
