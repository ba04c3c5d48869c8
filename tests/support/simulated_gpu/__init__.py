"""A GPU that is simulated on the CPU, as torch's device ``simgpu``.

Programs for CUDA run on it with every hazard that CUDA has: device memory is out of the host's reach, autograd works in
a thread of its own, asynchronous copies happen as late as they may, and a missing wait is found and named::

    from tests.support.simulated_gpu import install, settings
    install()
    settings(mode="late")
    torch.ones(3, device="simgpu")

It stays for the whole process and changes what torch takes for the accelerator: only processes made for it install it
(see ``isolation.py``).
"""

from __future__ import annotations

from tests.support.simulated_gpu.control import install, pending, reset, settings

__all__ = ["install", "pending", "reset", "settings"]
