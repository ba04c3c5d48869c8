"""A GPU that is simulated on the CPU, as torch's device ``simgpu``.

Programs for CUDA run on it with every hazard that CUDA has: device memory is out of the host's reach, autograd works in
a separate thread, asynchronous copies happen as late as they may, and a missing wait is found and named::

    from tests.support.simulated_gpu import install, settings
    install()
    settings(mode="late")
    torch.ones(3, device="simgpu")

- **Memory.** Tensors have addresses that the host may not touch; freed and new memory is filled with 0xFF. Sizes are
  exact (multiples of 512), freed memory stays with its stream, and a full device raises ``torch.OutOfMemoryError``.
  The first matrix product of a thread on a stream takes a workspace, which stays, as cuBLAS's does.
- **Operators** are the CPU's kernels over the same bytes, so results are the CPU's. They compute at once, in the thread
  that calls. Tensors of the host and of the device do not mix, as on CUDA.
- **Copies** with ``non_blocking=True`` are queued, from ordinary host memory too, and done when something waits for
  them: an operator of the same stream, an event, a synchronisation. Until then a host buffer that will be written
  holds 0xFF.
- **Waits** are checked: every operator and copy notes the address ranges it uses. What conflicts with an earlier use by
  another stream, and is in no order with it, raises and names both. So does a change of host bytes under a queued copy.

What CUDA does and this does not: operators never run late (only copies do), the host's own reads of a buffer are not
seen (it finds 0xFF), and one clock stands for all threads of the host.

The device stays for the whole process and changes what torch takes for the accelerator: only processes made for it
install it (see ``isolation.py``).
"""

from __future__ import annotations

from tests.support.simulated_gpu.control import install, pending, reset, settings

__all__ = ["install", "pending", "reset", "settings"]
