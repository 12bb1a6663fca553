"""Batch sizes of captured steps."""

from __future__ import annotations

import pytest
from vllmx_cuda.device.buckets import bucket_of, bucket_sizes, mixed_sizes


def test_the_sizes_of_the_design() -> None:
    assert bucket_sizes(1024)[:6] == (1, 2, 4, 8, 16, 24)
    assert bucket_sizes(1024)[-3:] == (248, 256, 512)
    assert bucket_sizes(256)[-1] == 256
    assert bucket_sizes(300)[-2:] == (256, 300)
    assert bucket_sizes(5) == (1, 2, 4, 5)
    assert bucket_sizes(1) == (1,)
    assert bucket_sizes(0) == ()
    assert mixed_sizes(1024)[:4] == (2, 8, 24, 40)
    assert mixed_sizes(1024)[-1] == 248
    assert mixed_sizes(1) == ()


@pytest.mark.parametrize("max_rows", [1, 3, 8, 9, 100, 256, 257, 512, 4096])
def test_every_batch_up_to_the_greatest_has_the_smallest_bucket_that_holds_it(
    max_rows: int,
) -> None:
    sizes = bucket_sizes(max_rows)
    assert list(sizes) == sorted(set(sizes))
    for rows in range(1, min(max_rows, 512) + 1):
        assert bucket_of(rows, sizes) == min(size for size in sizes if size >= rows)
    assert bucket_of(sizes[-1] + 1, sizes) is None
