"""The head's chunks are the largest that fit the device and divide the layers' chunks."""

import pytest

from tuneserve_engine.backend.jax.training.head_chunks import head_chunk_blocks


@pytest.mark.parametrize(
    ("block", "chunk", "vocab_size", "blocks"),
    [
        (64, 256, 8192, 4),
        (64, 256, 131_072, 4),  # 128 MiB exactly
        (64, 256, 131_073, 2),
        (64, 384, 131_072, 3),
        (64, 256, 10**7, 1),
    ],
)
def test_chunks_are_the_largest_divisor_that_fits(
    block: int, chunk: int, vocab_size: int, blocks: int
) -> None:
    assert head_chunk_blocks(block, chunk, vocab_size, "cpu") == blocks


def test_a_gpu_takes_eight_times_the_rows() -> None:
    assert head_chunk_blocks(64, 2048, 131_072, "gpu") == 32  # 1 GiB exactly
    assert head_chunk_blocks(64, 2048, 131_073, "gpu") == 16
