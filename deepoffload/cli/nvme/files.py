"""The files of a measurement: allocated before they are written, without a name, gone with the process."""

from __future__ import annotations

import errno
import os
import secrets
from types import TracebackType

import numpy as np

from deepoffload.cli.nvme.data import PAGE_BYTES, Stamps, make_stamps
from deepoffload.config.units import format_bytes
from deepoffload.errors import BudgetError, ConfigError
from deepoffload.io.swap_files import PREFIX, SUFFIX, free_bytes

# Left free: a full file system breaks other programs, and disks get slow near the end.
MARGIN_MIN_BYTES, MARGIN_MAX_BYTES = 64 << 20, 4 << 30
MARGIN_SHARE = 0.05


class BenchFile:
    """One file and what it holds, page by page.

    ``proc_path`` opens it from any process of this user, although it has no name. ``filled_bytes`` is how much of it
    may be measured: what was written at least once.
    """

    def __init__(self, directory: str, serial: int, size_bytes: int) -> None:
        self.directory = directory
        self.serial = serial
        self.size_bytes = size_bytes
        self.filled_bytes = 0
        self.descriptor = _create_unnamed(directory)
        self._generation = 0
        self._stamps: Stamps = np.zeros(size_bytes // PAGE_BYTES, dtype=np.uint64)
        try:
            _allocate(self.descriptor, directory, size_bytes)
        except BaseException:
            self.close()
            raise

    @property
    def proc_path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.directory} (file {self.serial})"

    def stamps(self, offset: int, nbytes: int) -> Stamps:
        """What the pages hold now; a view."""
        return self._stamps[offset // PAGE_BYTES : (offset + nbytes) // PAGE_BYTES]

    def next_stamps(self, offset: int, nbytes: int) -> Stamps:
        """New stamps for pages about to be written; remembered as what they hold."""
        self._generation += 1
        first, count = offset // PAGE_BYTES, nbytes // PAGE_BYTES
        self._stamps[first : first + count] = make_stamps(self.serial, first, count, self._generation)
        return self._stamps[first : first + count]

    def drop_cache(self) -> None:
        """Writes back what is dirty and takes the file out of the page cache (on tmpfs it stays: that is its home)."""
        os.fdatasync(self.descriptor)
        os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Gives the disk space back. Idempotent."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> BenchFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def margin_bytes(directory: str) -> int:
    """Bytes that stay free on the file system, for every request."""
    status = os.statvfs(directory)
    return min(MARGIN_MAX_BYTES, max(MARGIN_MIN_BYTES, int(MARGIN_SHARE * status.f_blocks * status.f_frsize)))


def room_by_path(directories: list[str]) -> dict[str, int]:
    """Bytes each directory may take, without the margin; paths on one file system share what it has."""
    devices = [os.stat(directory).st_dev for directory in directories]
    return {
        directory: max(0, free_bytes(directory) - margin_bytes(directory)) // devices.count(device)
        for directory, device in zip(directories, devices, strict=True)
    }


def check_room(directories: list[str], bytes_each: int) -> None:
    """Refuses what would leave less than the margin.

    Raises:
        BudgetError: saying which path, what is free and what to say instead.
    """
    for directory, room in room_by_path(directories).items():
        if bytes_each > room:
            raise BudgetError(
                f"--size: {format_bytes(bytes_each)} are needed on {directory}, but only {format_bytes(room)} may be "
                f"used: {format_bytes(free_bytes(directory))} are free there, and "
                f"{format_bytes(margin_bytes(directory))} stay free. "
                "Give a smaller --size, free space, or name another --path."
            )


def _create_unnamed(directory: str) -> int:
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
            raise _cannot_create(directory, error) from error
    # A file system without unnamed files: the name is one that the engine recognises as a dead run's.
    path = os.path.join(directory, f"{PREFIX}bench-{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _cannot_create(directory, error) from error
    os.unlink(path)
    return descriptor


def _cannot_create(directory: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"--path: no file can be created in {directory}: {error.strerror}. Name a directory you may write to."
    )


def _allocate(descriptor: int, directory: str, size_bytes: int) -> None:
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, str(error.errno))
        raise BudgetError(
            f"--size: {format_bytes(size_bytes)} cannot be allocated in {directory}: {name} ({error.strerror}), "
            f"{format_bytes(free_bytes(directory))} are free. Give a smaller --size or name another --path."
        ) from error
