"""Maps a GPU's compute capability to the architecture that kernels are compiled for."""

from __future__ import annotations

from vllmx_core.errors import BackendUnavailableError

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a")
"""The architectures that kernels are compiled for and checked against the budget. An "a"
architecture has instructions of its own (wgmma, tcgen05), and its cubins run on no other."""
_BY_CAPABILITY = {
    (int(name[3:].rstrip("a")[:-1]), int(name[3:].rstrip("a")[-1])): name for name in ARCHITECTURES
}


def architecture(capability: tuple[int, int]) -> str:
    """The best of `ARCHITECTURES` for a GPU. A capability that is not listed gets the plain
    architecture of its own number (sm_87, sm_121), for which the kernels' portable paths are
    compiled. Raises BackendUnavailableError below 7.5."""
    if capability < (7, 5):
        raise BackendUnavailableError(
            f"the GPU has compute capability {capability[0]}.{capability[1]}, the kernels need 7.5"
            " (Turing) or newer: use --backend cpu"
        )
    return _BY_CAPABILITY.get(capability, f"sm_{capability[0]}{capability[1]}")


def number(arch: str) -> int:
    """sm_90a -> 90."""
    return int(arch.removeprefix("sm_").rstrip("af"))


def capability(arch: str) -> tuple[int, int]:
    """sm_90a -> (9, 0)."""
    return divmod(number(arch), 10)
