"""Emulated devices whose kernels wait for each other, each on a thread of its own.

Each rank has copies of the compiled kernels, for a loaded library runs one launch at a time. One
rank runs at a time, until it looks for a word of another one: so a test meets the same interleaving
each time, and nothing races but what the kernels let race.
"""

from __future__ import annotations

import ctypes
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy.typing as npt

_PassOn = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)
_QUIET = 2000
"""Polls of all ranks in turn without news before waits are known to be futile."""
_ALONE_S = 0.005


class Turns:
    """Lets the ranks that are here run, one at a time; with `endless`, more may come."""

    def __init__(self, *, endless: bool = False) -> None:
        self._endless = endless
        self._here: list[int] = []
        self._turn: int | None = None
        self._quiet = 0
        self._changed = threading.Condition()

    def come(self, ranks: Sequence[int]) -> None:
        """Adds ranks to those that take turns, without waiting."""
        with self._changed:
            self._here = sorted({*self._here, *ranks})
            self._quiet = 0
            if self._turn is None:
                self._turn = self._here[0]
            self._changed.notify_all()

    def wait(self, rank: int) -> None:
        """Returns when it is the turn of this rank."""
        with self._changed:
            self._changed.wait_for(lambda: self._turn == rank)

    def leave(self, rank: int) -> None:
        """Takes the rank out of the turns, as often as one likes."""
        with self._changed:
            if rank in self._here:
                behind = self._behind(rank)
                self._here.remove(rank)
                if self._turn == rank:
                    self._turn = behind if self._here else None
            self._changed.notify_all()

    def pass_on(self, rank: int, told: bool) -> bool:
        """Lets the others run; `told`: this one has told them something. True when all have looked
        so often that nothing will come."""
        with self._changed:
            self._quiet = 0 if told else self._quiet + 1
            if self._endless and self._here == [rank]:
                self._changed.wait(_ALONE_S)
            self._turn = self._behind(rank)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._turn == rank)
            return not self._endless and self._quiet > _QUIET * len(self._here)

    def is_here(self, rank: int) -> bool:
        with self._changed:
            return rank in self._here

    def _behind(self, rank: int) -> int:
        later = [one for one in self._here if one > rank]
        return later[0] if later else self._here[0]


class PeerGroup:
    """Ranks whose launches meet, and the memory that they share.

    Args:
        endless: see `Turns`.
    """

    def __init__(self, num_ranks: int, *, endless: bool = False) -> None:
        self.num_ranks = num_ranks
        self.turns = Turns(endless=endless)
        self._folder = tempfile.TemporaryDirectory()  # lives as long as the group
        self._shared: list[npt.NDArray[Any]] = []
        self._memories: list[int] = []
        self._home: ctypes.CDLL | None = None
        self._ranks: list[int] = []
        self._lock = threading.Lock()
        self._copies = 0
        self._callbacks = [self._callback(rank) for rank in range(num_ranks)]

    def share(self, array: npt.NDArray[Any]) -> None:
        """Adds memory that all ranks may read and write; before the first launch."""
        assert self._home is None, "memory is shared before the first launch"
        self._shared.append(array)

    def _callback(self, rank: int) -> Any:
        return _PassOn(lambda told: int(self.turns.pass_on(rank, bool(told))))

    def load(self, path: Path, rank: int) -> tuple[Path, ctypes.CDLL]:
        """Loads a copy of a module for this rank, and where it lies."""
        with self._lock:
            self._copies += 1
            copy = Path(self._folder.name) / f"{self._copies}-{path.name}"
            shutil.copyfile(path, copy)
            library = ctypes.CDLL(str(copy))
            if self._home is None:
                self._make(library)
        memories = (ctypes.c_void_p * len(self._memories))(*self._memories)
        address, count = ctypes.c_void_p(self._ranks[rank]), len(self._memories)
        library.emu_join(address, memories, count, self._callbacks[rank])
        return copy, library

    def _make(self, library: ctypes.CDLL) -> None:
        library.emu_make_rank.restype = library.emu_make_shared.restype = ctypes.c_void_p
        library.emu_make_shared.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
        self._ranks = [library.emu_make_rank(rank) for rank in range(self.num_ranks)]
        self._memories = [
            library.emu_make_shared(array.ctypes.data, array.nbytes) for array in self._shared
        ]
        self._home = library

    @contextmanager
    def taking_turns(self, rank: int) -> Iterator[None]:
        """A launch of this rank."""
        if self.turns.is_here(rank):
            yield
            return
        self.turns.come([rank])
        self.turns.wait(rank)
        try:
            yield
        finally:
            self.turns.leave(rank)

    def run(self, works: Sequence[Callable[[], None]]) -> None:
        """All ranks' work at once, on a thread each; the first rank runs first. Raises what the
        first of them raised that failed."""
        failed: list[BaseException] = []

        def of(rank: int) -> None:
            try:
                self.turns.wait(rank)
                works[rank]()
            except BaseException as error:
                failed.append(error)
            finally:
                self.turns.leave(rank)

        threads = [threading.Thread(target=of, args=(rank,)) for rank in range(len(works))]
        self.turns.come(range(len(works)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]

    def close(self) -> None:
        """Gives back what the checker knows of the ranks; nothing may be launched any more."""
        if self._home is not None:
            for free, made in (
                (self._home.emu_free_rank, self._ranks),
                (self._home.emu_free_shared, self._memories),
            ):
                for address in made:
                    free(ctypes.c_void_p(address))
            self._ranks, self._memories = [], []
        self._folder.cleanup()
