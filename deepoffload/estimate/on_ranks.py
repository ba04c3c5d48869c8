"""What several ranks of this host measure together, as they train together: processor, update, operators, link.

A rank that computes alone is faster than one whose neighbours compute, too. So the command starts itself once for each
rank. All measure at the same time, and rank 0 answers. Under torchrun it is started so already, also on several hosts.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from deepoffload.errors import ConfigError, DeepOffloadError, UsageError
from deepoffload.estimate import measure
from deepoffload.estimate.machine import MachineSpec
from deepoffload.estimate.progress import Report
from deepoffload.estimate.recording import DryRun
from deepoffload.estimate.step_time import OpTimes
from deepoffload.machine import usable_cores
from deepoffload.ranks.group import RankGroup, open_group
from deepoffload.ranks.places import read_launch
from deepoffload.ranks.transport import open_exchange
from deepoffload.runtime.link_rates import link_rates

LIMIT_S = 600.0
"""A rank that takes longer to come is waited for no more."""


def launched_ranks() -> int:
    """How many ranks a launcher has started, this process among them; 1 where none has.

    Raises:
        ConfigError: the environment contradicts itself.
    """
    launch = read_launch(os.environ)
    return 1 if launch is None else launch.world_size


def start(ranks: int, argv: Sequence[str]) -> int:
    """Run ``python -m deepoffload.estimate`` with ``argv`` on so many ranks of this host, and pass on what rank 0
    prints. Returns its exit status: what another rank fails with, it has been told."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = max(1, usable_cores() // ranks)
    processes = []
    try:
        for rank in range(ranks):
            said = {
                "RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks,
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": threads,
            }  # fmt: skip
            environment = os.environ | {name: str(value) for name, value in said.items()}
            quiet = None if rank == 0 else subprocess.DEVNULL
            command = [sys.executable, "-m", "deepoffload.estimate", *argv]
            processes.append(subprocess.Popen(command, env=environment, stdout=quiet, stderr=quiet))
        return processes[0].wait()
    finally:
        for process in processes:
            process.kill()


class MeasuringRanks:
    """This process among the ranks that measure together. Every method is collective.

    Args:
        transport: as ``ranks.transport``.

    Raises:
        RankError: a rank does not come. ConfigError, UnsupportedError: as the engine's start.
    """

    def __init__(self, transport: str) -> None:
        group = open_group(torch.device("cpu"), timeout_s=LIMIT_S)
        if group is None:
            raise ConfigError("one rank has nobody to measure with")
        self._group: RankGroup = group
        try:
            self._exchange = open_exchange(group, transport, torch.get_num_threads())
        except DeepOffloadError:
            group.close()
            raise

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which answers."""
        return self._group.ranks.rank == 0

    def same(self, spec: MachineSpec) -> MachineSpec:
        """What rank 0 gives: all answer the same question."""
        return self._group.gather_objects(spec, "the machine")[0]

    def machine(self, spec: MachineSpec, path: str | None, progress: Report) -> MachineSpec:
        """``spec`` with what one rank has while all compute. Rank 0 measures the disk."""
        ranks = self._group.ranks
        each = len(ranks.host_ranks)
        if len(set(Counter(ranks.hosts).values())) > 1:
            raise UsageError("the hosts have different numbers of ranks: an estimate is for equal ones")
        self._meet("the processor")
        found = measure.measure_processor(spec, path, progress, lambda: self._meet("processor and memory"))
        self._meet("the disk")
        if path is not None and self.is_first:
            found = measure.measure_disk(found, path, progress)
        found = self.same(found)
        rates = link_rates(self._group, self._exchange, fresh=True)
        return replace(
            found,
            nodes=ranks.host_count,
            devices_per_node=each,
            host_bytes_per_s=found.host_bytes_per_s * each,  # of a node: each rank has measured its own
            rank_gather_bytes_per_s=rates.gather_bytes_per_s,
            rank_reduce_bytes_per_s=rates.reduce_bytes_per_s,
        )

    def ops(self, run: DryRun, *, progress: Report) -> OpTimes:
        """Seconds of a model's operators while all ranks compute."""
        self._meet("operators")
        return measure.measure_ops(run, progress=progress)

    def close(self) -> None:
        """End, when all have measured."""
        self._exchange.close()
        self._group.close()

    def _meet(self, what: str) -> None:
        self._group.gather_objects(None, f"measuring {what}")
