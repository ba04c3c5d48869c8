"""A folder that appears when it is complete, and takes the place of nothing."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

from deepoffload.checkpoint.directory import prepare, staging, sync_directory
from deepoffload.checkpoint.safetensors_file import failure
from deepoffload.errors import IoFailure, UsageError

SMALL_FILES_BYTES = 4 << 20
"""Room asked for in addition to the tensors: for names, headers and descriptions."""


def check_free(directory: str) -> str:
    """The absolute path of an output folder.

    Raises:
        UsageError: something is there already.
    """
    path = os.path.abspath(directory)
    try:
        taken = os.path.lexists(path) and (not os.path.isdir(path) or os.path.islink(path) or bool(os.listdir(path)))
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}); give another output directory") from error
    if taken:
        raise UsageError(f"{path} is there already and is not empty; a conversion replaces nothing: give a new name")
    return path


@contextmanager
def new_folder(directory: str, needed_bytes: int) -> Iterator[str]:
    """A folder to fill. When the context ends without an error, everything in it is put on the disk, and it becomes
    ``directory``; otherwise it is removed.

    Raises:
        UsageError: the place is taken or cannot be written. IoFailure: no room, or the disk failed.
    """
    path = check_free(directory)
    parent = os.path.dirname(path)
    prepare(parent, needed_bytes + SMALL_FILES_BYTES, "converting")
    with staging(parent) as holder:
        staged = os.path.join(holder, "new")
        try:
            os.mkdir(staged)
            yield staged
            _sync_file_system(staged)
            check_free(directory)
            os.rename(staged, path)
            sync_directory(parent)
        except IoFailure:
            raise
        except OSError as error:
            raise failure("writing", error, error.filename or path, 0) from error


def _sync_file_system(folder: str) -> None:
    """Put everything on the disk in one call: there may be ten thousand files."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if libc.syncfs(descriptor):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), folder)
    finally:
        os.close(descriptor)
