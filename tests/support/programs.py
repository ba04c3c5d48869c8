"""Programs of tests, each in a separate process, which ``program_server.py`` forks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

SERVER = Path(__file__).with_name("program_server.py")
ROOT = Path(__file__).parents[2]


class Programs:
    """Runs one at a time. The server starts with the first; close it at the end."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None

    def run(
        self,
        program: Path | str,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        timeout_s: float = 200.0,
    ) -> subprocess.CompletedProcess[str]:
        """As ``subprocess.run`` of ``python program arguments``. A text is the program itself. ``env``: added to ours.

        Raises:
            subprocess.TimeoutExpired: it took longer, and was killed.
        """
        source, name = (program, "<string>") if isinstance(program, str) else (program.read_text(), str(program))
        argv = [name, *arguments]
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            request = {
                "source": source,
                "argv": argv,
                "cwd": str(cwd),
                "env": {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
            }
            code = self._ended(request, [output.fileno(), errors.fileno()], timeout_s)
            output.seek(0)
            errors.seek(0)
            done = subprocess.CompletedProcess(argv, code or 0, output.read(), errors.read())
            if code is None:
                raise subprocess.TimeoutExpired(argv, timeout_s, done.stdout, done.stderr)
        return done

    def close(self) -> None:
        if self._server is not None and self._connection is not None:
            self._connection.close()
            self._server.wait(60)
            self._server = None

    def _ended(self, request: dict[str, object], files: list[int], timeout_s: float) -> int | None:
        """Its exit status; None for a program that had to be killed."""
        connection = self._connected()
        socket.send_fds(connection, [json.dumps(request).encode()], files)
        process = json.loads(connection.recv(64))
        connection.settimeout(timeout_s)
        try:
            return json.loads(connection.recv(64))
        except TimeoutError:
            connection.settimeout(None)
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
            connection.recv(64)
            return None
        finally:
            connection.settimeout(None)

    def _connected(self) -> socket.socket:
        if self._connection is None or self._server is None or self._server.poll() is not None:
            self._connection, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._server = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", str(SERVER), str(other.fileno())],
                pass_fds=[other.fileno()],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
            other.close()
        return self._connection
