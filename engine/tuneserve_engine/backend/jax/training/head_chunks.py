"""The size of the LM head's chunks. Needs no JAX: plans are made without it."""

_CPU_LOGITS_BYTES, _LOGITS_BYTES = 2**27, 2**30


def logits_bytes(device_kind: str) -> int:
    """Return the room for the float32 logits of one chunk; their gradient needs as much again.

    A CPU's products are not faster with more rows, and its memory is the machine's.
    """
    return _CPU_LOGITS_BYTES if device_kind == "cpu" else _LOGITS_BYTES


def head_chunk_blocks(block: int, chunk: int, vocab_size: int, device_kind: str) -> int:
    """Return the blocks per chunk of the head: the most whose logits fit ``logits_bytes``.

    The number divides the blocks of ``chunk`` tokens evenly, and is at least 1.
    """
    whole, room = chunk // block, logits_bytes(device_kind)
    fitting = (count for count in range(whole, 0, -1) if whole % count == 0)
    return next((count for count in fitting if 4 * count * block * vocab_size <= room), 1)
