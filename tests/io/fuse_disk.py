"""A file system of one directory in a separate process, whose transfers fail as asked: errors that no disk here has.

    python fuse_disk.py DIRECTORY ERRNO LIMIT_BYTES

Mounts itself over DIRECTORY and keeps its files in memory. A read or write that reaches beyond LIMIT_BYTES gets ERRNO.
What it speaks is the kernel's FUSE protocol (linux/fuse.h, fuse(4)) with nothing between, so that errors take the way
that those of a network file system take. It says "mounted" when it is, and ends with its mount.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys

ROOT = 1
MAX_WRITE_BYTES = 128 << 10
ASYNC_DIO = 1 << 15
LOOKUP, FORGET, GETATTR, SETATTR, UNLINK, OPEN, READ, WRITE, STATFS = 1, 2, 3, 4, 10, 14, 15, 16, 17
RELEASE, FLUSH, INIT, OPENDIR, READDIR, RELEASEDIR, CREATE, INTERRUPT, BATCH_FORGET = 18, 25, 26, 27, 28, 29, 35, 36, 42
NO_REPLY = (FORGET, INTERRUPT, BATCH_FORGET)
SET_SIZE = 1 << 3


class Disk:
    """Answers one request after the other."""

    def __init__(self, code: int, limit_bytes: int) -> None:
        self.code, self.limit_bytes = code, limit_bytes
        self.names: dict[bytes, int] = {}
        self.files: dict[int, bytearray] = {}

    def answer(self, opcode: int, node: int, body: bytes) -> bytes | int:
        """The reply's body, or a negative errno."""
        if opcode == INIT:
            major, minor, ahead = struct.unpack_from("=III", body)
            return struct.pack(
                "=IIIIHHIIHHI28x", major, min(minor, 31), ahead, ASYNC_DIO, 16, 12, MAX_WRITE_BYTES, 1, 0, 0, 0
            )
        if opcode in (LOOKUP, UNLINK):
            name = body.rstrip(b"\0")
            if name not in self.names:
                return -errno.ENOENT
            return self._entry(self.names[name]) if opcode == LOOKUP else self._unlink(name)
        if opcode == CREATE:
            number = len(self.files) + ROOT + 1
            self.names[body[16:].rstrip(b"\0")] = number
            self.files[number] = bytearray()
            return self._entry(number) + bytes(16)
        if opcode in (OPEN, OPENDIR):
            return bytes(16)
        if opcode == GETATTR:
            return struct.pack("=QII", 0, 0, 0) + self._attributes(node)
        if opcode == SETATTR:
            valid, size = struct.unpack_from("=I12xQ", body)
            if valid & SET_SIZE:
                self._resize(self.files[node], size)
            return struct.pack("=QII", 0, 0, 0) + self._attributes(node)
        if opcode in (READ, WRITE):
            return self._transfer(opcode, node, body)
        if opcode == STATFS:
            return struct.pack("=QQQQQIIII24x", 1 << 20, 1 << 20, 1 << 20, 100, 100, 4096, 255, 4096, 0)
        return b"" if opcode in (RELEASE, RELEASEDIR, FLUSH, READDIR) else -errno.ENOSYS

    def _transfer(self, opcode: int, node: int, body: bytes) -> bytes | int:
        offset, size = struct.unpack_from("=8xQI", body)
        if offset + size > self.limit_bytes:
            return -self.code
        held = self.files[node]
        if opcode == READ:
            return bytes(held[offset : offset + size])
        self._resize(held, max(len(held), offset + size))
        held[offset : offset + size] = body[40:]
        return struct.pack("=II", size, 0)

    def _unlink(self, name: bytes) -> bytes:
        del self.names[name]  # the file stays for those who have it open
        return b""

    @staticmethod
    def _resize(held: bytearray, size: int) -> None:
        del held[size:]
        held.extend(bytes(size - len(held)))

    def _entry(self, node: int) -> bytes:
        return struct.pack("=QQQQII", node, 0, 0, 0, 0, 0) + self._attributes(node)

    def _attributes(self, node: int) -> bytes:
        size = 0 if node == ROOT else len(self.files[node])
        mode = 0o40700 if node == ROOT else 0o100600
        links = 2 if node == ROOT else list(self.names.values()).count(node)
        return struct.pack("=6Q10I", node, size, -(-size // 512), 0, 0, 0, 0, 0, 0, mode, links, 0, 0, 0, 4096, 0)


def main(directory: str, code: int, limit_bytes: int) -> None:
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"fuse_disk", os.fsencode(directory), b"fuse", ctypes.c_ulong(0), options):
        raise OSError(ctypes.get_errno(), "mount")
    print("mounted", flush=True)
    disk = Disk(code, limit_bytes)
    while True:
        try:
            request = os.read(device, MAX_WRITE_BYTES + 8192)
        except OSError as error:
            if error.errno == errno.ENODEV:  # unmounted
                return
            raise
        _, opcode, unique, node = struct.unpack_from("=IIQQ", request)
        if opcode in NO_REPLY:
            continue
        answer = disk.answer(opcode, node, request[40:])
        body, failed = (answer, 0) if isinstance(answer, bytes) else (b"", answer)
        os.write(device, struct.pack("=IiQ", 16 + len(body), failed, unique) + body)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
