"""How a safetensors file begins: the length of its header, and JSON (https://huggingface.co/docs/safetensors)."""

from __future__ import annotations

LENGTH_BYTES = 8
HEADER_BYTES_MAX = 100_000_000
"""The format allows no more."""


def header_length(begin: bytes, file_nbytes: int, at_most: int = HEADER_BYTES_MAX) -> int:
    """Bytes of the JSON that follows the length.

    Args:
        begin: the first :data:`LENGTH_BYTES` of the file, or more.
        file_nbytes: of all of it.
        at_most: what a header may take here.

    Raises:
        ValueError: no header of a file of this size is so long. The message is the end of a sentence.
    """
    length = int.from_bytes(begin[:LENGTH_BYTES], "little")
    if len(begin) < LENGTH_BYTES or length > min(at_most, HEADER_BYTES_MAX, file_nbytes - LENGTH_BYTES):
        raise ValueError(f"its header cannot be {length} bytes long")
    return length
