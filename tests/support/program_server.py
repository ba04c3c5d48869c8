"""A process that has imported torch, and forks one for each program that it is asked to run.

    python tests/support/program_server.py SOCKET

A fork takes a hundredth of the two seconds of CPU that importing torch takes. Nothing of deepoffload is imported here.
The program is the main module of its process, begins with its own arguments, environment, folder and output, and ends
as any program of Python does.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
from types import ModuleType
from typing import Any

REQUEST_BYTES = 1 << 20


def import_torch() -> None:
    """And what checkpoints of activations import."""
    del sys.path[0]  # this folder, which has modules with names of the standard library
    import torch._dynamo  # noqa: F401


def serve(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """In the process of a program: what to run, and where its output goes. In the server: None, at the end."""
    while True:
        data, files, _, _ = socket.recv_fds(connection, REQUEST_BYTES, 2)
        if not data:
            return None
        child = os.fork()
        if not child:
            connection.close()
            return json.loads(data), files
        for file in files:
            os.close(file)
        connection.send(json.dumps(child).encode())
        connection.send(json.dumps(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())


def become(request: dict[str, Any], files: list[int]) -> dict[str, Any]:
    """Take everything over that a new process would have; the namespace of the program."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, file in enumerate((nothing, *files)):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = request["argv"]
    sys.path.insert(0, os.path.dirname(request["argv"][0]))
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__dict__["__file__"] = request["argv"][0]
    return main.__dict__


if __name__ == "__main__":
    import_torch()
    gc.collect()
    gc.freeze()  # what has been imported is no garbage: programs and their ends need not look at it
    assert len(os.listdir("/proc/self/task")) == 1, "threads are not forked"
    asked = serve(socket.socket(fileno=int(sys.argv[1])))
    if asked is not None:
        exec(compile(asked[0]["source"], asked[0]["argv"][0], "exec"), become(*asked))
