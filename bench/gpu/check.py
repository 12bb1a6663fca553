"""Says what the CUDA backend finds here; exits 1 with the reason where run.sh cannot do its work.

python bench/gpu/check.py [--rehearse]
"""

import importlib.util
import platform
import sys
from importlib import metadata

NEEDED = ("numpy", "pluggy", "msgspec", "jinja2", "tokenizers", "pytest", "hypothesis")
"""Packages that the backend, the engine's core and the conformance suite import."""
SHOWN = ("numpy", "torch", "transformers", "pytest", "pytest-xdist", "pytest-timeout")


def main() -> int:
    print(f"python: {platform.python_version()}")
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if lacking:
        words = " ".join(lacking)
        print(
            f"Python packages are missing here: {words}. Where nothing can be installed, run"
            f" 'pip download --no-deps --only-binary=:all: --python-version"
            f" {sys.version_info.major}.{sys.version_info.minor} -d WHEELS {words}' elsewhere and"
            " give run.sh that folder",
            file=sys.stderr,
        )
        return 1
    print("packages:", ", ".join(f"{name} {_version(name)}" for name in SHOWN))
    from vllmx_cuda.environment import facts
    from vllmx_cuda.plugin import probe

    for name, fact in facts().items():
        print(f"{name}: {fact}")
    reason = probe()
    if reason is not None and "--rehearse" not in sys.argv:
        print(f"the CUDA backend cannot run here: {reason}", file=sys.stderr)
        return 1
    return 0


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "missing"


if __name__ == "__main__":
    sys.exit(main())
