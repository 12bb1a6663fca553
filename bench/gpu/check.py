"""Says what the CUDA backend finds here; exits 1 with the reason where it cannot run."""

import sys

from vllmx_cuda.environment import facts
from vllmx_cuda.plugin import probe


def main() -> int:
    for name, fact in facts().items():
        print(f"{name}: {fact}")
    reason = probe()
    if reason is not None:
        print(f"the CUDA backend cannot run here: {reason}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
