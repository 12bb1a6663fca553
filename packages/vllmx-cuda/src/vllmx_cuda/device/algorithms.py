"""Chooses a cuBLASLt algorithm for each product: measured once per machine, then cached on disk.

One measurement (taken while `measuring`) serves all numbers of rows that `measured_rows` maps to
the same value. The choice is stored next to the compiled kernels, so timing noise cannot change it
at the next start: the same algorithm gives the same bits. It does not change within a process
either: a product that has run with the library's default is not measured later.
"""

from __future__ import annotations

import json
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from vllmx_cuda.compiler.cubins import why_unsafe, write_whole
from vllmx_cuda.device.buckets import measured_rows
from vllmx_cuda.device.cublaslt import (
    ALGORITHM_BYTES,
    WORKSPACE_BYTES,
    Addresses,
    Algorithm,
    CublasLt,
    CublasLtError,
    Matmul,
)
from vllmx_cuda.device.device import Product

logger = logging.getLogger("vllmx.cuda")

_ANYWHERE = 1 << 20
"""An aligned address for the bias and scales of a product that is asked for and not run."""

CANDIDATES = 8
FAR_BEHIND = 1.3
"""A candidate whose first time is so many times the best one is not timed again."""
_TIMED_CALLS, _TIMED_S = 10, 2e-3
"""Calls that a time is the mean of, and after how much of it fewer do."""
MOST_PRODUCTS = 4096
"""Kept with their descriptors; the one that was not used for longest goes first."""


@dataclass
class AlgorithmFile:
    """Choices of one kind of GPU and version of the library, as a JSON object."""

    path: Path
    _known: dict[str, Algorithm] = field(default_factory=dict)
    _is_saved: bool = True

    def __post_init__(self) -> None:
        if why_unsafe(self.path.parent) is not None:
            return
        try:
            stored = json.loads(self.path.read_text())
            found = {
                key: Algorithm(bytes.fromhex(entry["data"]), int(entry["workspace_bytes"]))
                for key, entry in stored.items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return  # missing or damaged: measured again
        self._known = {
            key: algorithm
            for key, algorithm in found.items()
            if len(algorithm.data) == ALGORITHM_BYTES
            and 0 <= algorithm.workspace_bytes <= WORKSPACE_BYTES
        }

    def get(self, product: Product) -> Algorithm | None:
        """Returns the algorithm chosen for its number of rows."""
        return self._known.get(_key(product))

    def put(self, product: Product, algorithm: Algorithm) -> None:
        """Sets the algorithm of all products that have the number of rows of `product` or share its
        choice. It is remembered in this process; `save` writes."""
        self._known[_key(product)] = algorithm
        self._is_saved = False

    def save(self) -> None:
        """Nothing where nothing is new. Atomic; two processes that save at once lose one's choices,
        no more."""
        if self._is_saved:
            return
        self._is_saved = True
        stored = {
            key: {"data": a.data.hex(), "workspace_bytes": a.workspace_bytes}
            for key, a in sorted(self._known.items())
        }
        try:
            write_whole(self.path, json.dumps(stored).encode())
        except OSError as error:
            logger.warning("choices of algorithms cannot be kept in %s: %s", self.path, error)


def _key(product: Product) -> str:
    same = replace(product, m=measured_rows(product.m))
    return " ".join(map(str, asdict(same).values()))


class Algorithms:
    """Descriptors and choices for all products of a model.

    Args:
        measure: device seconds of one call of its argument, the mean of so many.
    """

    def __init__(
        self,
        lt: CublasLt,
        file: AlgorithmFile,
        measure: Callable[[Callable[[], None], int], float],
        make_matmul: Callable[[CublasLt, Product], Matmul] = Matmul,
    ) -> None:
        self._lt, self._file, self._measure, self._make = lt, file, measure, make_matmul
        self._ready: OrderedDict[Product, tuple[Matmul, Algorithm]] = OrderedDict()
        self._exists: dict[Product, bool] = {}
        self._decided: set[str] = set()
        """Keys that are not measured any more."""
        self.measuring = False
        """True if products that were not seen before are measured."""

    def exists(self, product: Product) -> bool:
        """True if the library has an algorithm for it on this GPU. Queried once; a missing one is
        logged."""
        if product not in self._exists:
            if len(self._exists) == MOST_PRODUCTS:
                self._exists.clear()
            self._exists[product] = self._ask(product)
        return self._exists[product]

    def unmeasured(self, product: Product) -> bool:
        """True if a call now would measure it, given `measuring`."""
        if product in self._ready or _key(product) in self._decided:
            return False
        stored = self._file.get(product)
        if stored is None:
            return True
        with self._described(product) as matmul:
            return matmul.fitting(stored) is None

    @contextmanager
    def _described(self, product: Product) -> Iterator[Matmul]:
        matmul = self._make(self._lt, product)
        try:
            scales = _ANYWHERE if product.blocks else 0
            matmul.point(Addresses(_ANYWHERE if product.biased else 0, scales, scales))
            yield matmul
        finally:
            matmul.close()

    def _ask(self, product: Product) -> bool:
        try:
            with self._described(product) as matmul:
                return bool(matmul.algorithms(1))
        except CublasLtError as error:
            shape = product.dtype, product.n, product.k
            if shape not in {(p.dtype, p.n, p.k) for p, has in self._exists.items() if not has}:
                logger.info("%s: multiplied in another way", error)
            return False

    def choose(
        self, product: Product, addresses: Addresses, run: Callable[[Matmul, Algorithm], None]
    ) -> tuple[Matmul, Algorithm]:
        """Descriptor, pointed at bias and scales, and algorithm.

        Args:
            run: enqueues the product as it is meant, for the measurement.
        """
        if product in self._ready:
            self._ready.move_to_end(product)
            matmul, algorithm = self._ready[product]
            matmul.point(addresses)
            return matmul, algorithm
        matmul = self._make(self._lt, product)
        matmul.point(addresses)  # the heuristic looks at them
        try:
            algorithm = self._decide(product, matmul, run)
        except CublasLtError:
            matmul.close()
            raise
        self._ready[product] = matmul, algorithm
        if len(self._ready) > MOST_PRODUCTS:
            self._ready.popitem(last=False)[1][0].close()
        return matmul, algorithm

    def _decide(
        self, product: Product, matmul: Matmul, run: Callable[[Matmul, Algorithm], None]
    ) -> Algorithm:
        stored, key = self._file.get(product), _key(product)
        found = None if stored is None else matmul.fitting(stored)
        if found is None and self.measuring and key not in self._decided:
            found = self._fastest(matmul, run)
            self._file.put(product, found)
        self._decided.add(key)
        return matmul.algorithms(1)[0] if found is None else found

    def _fastest(self, matmul: Matmul, run: Callable[[Matmul, Algorithm], None]) -> Algorithm:
        candidates = matmul.algorithms(CANDIDATES)
        if len(candidates) == 1:
            return candidates[0]
        seconds: dict[Algorithm, float] = {}
        for candidate in candidates:
            try:
                seconds[candidate] = self._time(
                    partial(run, matmul, candidate), min(seconds.values(), default=math.inf)
                )
            except CublasLtError as error:  # proposed, and refused when it is asked for
                refusal = error
        if not seconds:
            raise refusal
        return min(seconds, key=seconds.__getitem__)

    def _time(self, call: Callable[[], None], best: float) -> float:
        call()  # loads the kernel
        first = self._measure(call, 1)
        calls = min(_TIMED_CALLS, int(_TIMED_S / max(first, 1e-9)))
        if calls <= 1 or first > FAR_BEHIND * best:
            return first
        return self._measure(call, calls)

    def save(self) -> None:
        """Keeps what was measured for the next start."""
        self._file.save()

    def close(self) -> None:
        for matmul, _ in self._ready.values():
            matmul.close()
        self._ready.clear()
