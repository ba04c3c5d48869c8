"""Which settings are measured: arithmetic, no disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from deepoffload.cli.nvme.arguments import Options
from deepoffload.cli.nvme.data import PERIOD_BYTES
from deepoffload.cli.nvme.job import smallest_file_bytes
from deepoffload.cli.nvme.types import Setting
from deepoffload.config.units import format_bytes
from deepoffload.errors import BudgetError, ConfigError

KIB, MIB = 1 << 10, 1 << 20
REFERENCE_BLOCK_BYTES, REFERENCE_DEPTH = MIB, 16
DEFAULT_SIZE_BYTES, QUICK_SIZE_BYTES = 1 << 30, 256 * MIB
# More bytes in flight give no disk more speed and take memory from training; such settings are measured if asked for.
FLIGHT_MAX_BYTES = 64 * MIB
BLOCKS, QUICK_BLOCKS = (256 * KIB, MIB, 4 * MIB, 16 * MIB), (256 * KIB, MIB, 8 * MIB)
DEPTHS, QUICK_DEPTHS = (2, 4, 8, 16, 32), (4, 16)
FILES = (1, 4)


@dataclass(frozen=True)
class Plan:
    """Settings in the order of measuring, the most useful first."""

    settings: tuple[Setting, ...]
    size_bytes: int
    """Per path."""
    files_max: int
    notes: tuple[str, ...]

    @property
    def file_bytes(self) -> int:
        """Of each file, whole periods of the data."""
        return self.size_bytes // self.files_max // PERIOD_BYTES * PERIOD_BYTES


def make_plan(options: Options, backends: Sequence[str], *, can_direct: bool, room_bytes: int) -> Plan:
    """The settings for what was asked, what the machine has and what fits on the disk.

    Args:
        backends: those that can be started here, the preferred first.
        can_direct: whether direct I/O works on all paths.
        room_bytes: what each path may take.

    Raises:
        ConfigError: nothing is left to measure; says why.
        BudgetError: the disk is too full for any setting.
    """
    notes: list[str] = []
    directs = options.direct or ((True, False) if can_direct else (False,))
    if True in directs and not can_direct:
        raise ConfigError(
            "--direct: direct I/O does not work on this path; leave it out, or say --direct buffered "
            "(a directory on a local ext4 or xfs disk has direct I/O)"
        )
    if not can_direct:
        notes.append("direct I/O does not work here: everything goes through the page cache")
    blocks = options.block_bytes or (QUICK_BLOCKS if options.quick else BLOCKS)
    depths = options.queue_depths or (QUICK_DEPTHS if options.quick else DEPTHS)
    files = options.files or ((1,) if options.quick else FILES)
    size = options.size_bytes
    if size is None:
        size = min(QUICK_SIZE_BYTES if options.quick else DEFAULT_SIZE_BYTES, max(room_bytes // 2, PERIOD_BYTES))
    wanted = [
        Setting(*values)
        for values in product(backends, blocks, depths, directs, files)
        if _is_wanted(options, can_direct, *values)
    ]
    if options.files is None and _crowded(wanted, size):
        wanted = [setting for setting in wanted if setting.files == 1]
        notes.append(f"several files at once are not measured: {format_bytes(size)} are too little for that")
    wanted.sort(key=lambda setting: _distance(setting, backends))
    files_max = max((setting.files for setting in wanted), default=1)
    plan = Plan(tuple(wanted), size, files_max, ())
    fitting = tuple(setting for setting in wanted if smallest_file_bytes(setting) <= plan.file_bytes)
    if len(fitting) < len(wanted):
        notes.append(
            f"{len(wanted) - len(fitting)} settings are left out: their requests in flight do not fit into "
            f"{files_max} file(s) of {format_bytes(plan.file_bytes)}; give a larger --size"
        )
    if not fitting:
        need = min(smallest_file_bytes(setting) for setting in wanted) * files_max if wanted else 0
        if options.size_bytes is None:
            raise BudgetError(
                f"--path: only {format_bytes(room_bytes)} may be used there, because some must stay free, and "
                f"{format_bytes(2 * need)} are needed: free space or name another directory"
            )
        raise ConfigError(
            f"--size: {format_bytes(size)} per path is too small for any setting asked for; at least "
            f"{format_bytes(need)} are needed: requests in flight must lie on different bytes. Give more, a smaller "
            "--block-size, --queue-depth or fewer --files."
        )
    return Plan(fitting, size, files_max, tuple(notes))


def _is_wanted(
    options: Options, can_direct: bool, backend: str, block: int, depth: int, direct: bool, files: int
) -> bool:
    """What was not asked for by name is measured only where it is likely to be useful."""
    asked_for_size = options.block_bytes is not None and options.queue_depths is not None
    if not asked_for_size and block * depth > FLIGHT_MAX_BYTES:
        return False
    if options.full:
        return True
    by_the_way = (not direct and can_direct and options.direct is None, files > 1 and options.files is None)
    if not any(by_the_way):
        return True
    if options.quick or all(by_the_way):
        return False
    blocks, depths = options.block_bytes, options.queue_depths
    return block == _nearest(REFERENCE_BLOCK_BYTES, blocks) and depth == _nearest(REFERENCE_DEPTH, depths)


def _crowded(wanted: Sequence[Setting], size_bytes: int) -> bool:
    """Whether dividing ``size_bytes`` among several files would leave no room for settings that a single file has."""
    files_max = max((setting.files for setting in wanted), default=1)
    needs = [smallest_file_bytes(setting) for setting in wanted if setting.files == 1]
    return any(size_bytes // files_max < need <= size_bytes for need in needs)


def _nearest(reference: int, values: Sequence[int] | None) -> int:
    return reference if values is None else min(values, key=lambda value: abs(value - reference))


def _distance(setting: Setting, backends: Sequence[str]) -> tuple[bool, int, int, int]:
    """How far from the usual setting: where time is short, the nearest are measured.

    Buffered ones come last, because what they leave to be written back disturbs those that follow.
    """
    steps = abs(setting.block_bytes.bit_length() - REFERENCE_BLOCK_BYTES.bit_length())
    steps += abs(setting.queue_depth.bit_length() - REFERENCE_DEPTH.bit_length())
    return (not setting.direct, steps, setting.files, backends.index(setting.backend))
