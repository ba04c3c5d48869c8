"""The command line of ``ds_nvme_bench``, with the flags of DeepSpeed's ``ds_io`` and ``ds_nvme_tune`` as aliases."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from deepoffload.cli.nvme.types import Pattern
from deepoffload.config.units import parse_bytes
from deepoffload.errors import ConfigError
from deepoffload.io.engine import BACKENDS
from deepoffload.native.aio import PAGE_BYTES, QUEUE_DEPTH_MAX, REQUEST_BYTES_MAX

FILES_MAX = 64
COMPARE_TOOLS = ("fio",)

DESCRIPTION = """\
Measures what the disk under DIR gives, and which settings reach it: backend, block size, queue depth, direct or
buffered transfers, number of files; reading, writing, and both at once. All data is checked. The last lines are an
"aio" block for the configuration; the bandwidths are kept, and deepoffload then uses them instead of measuring at
start. Test files have no names: they are gone when this program ends, however it ends.
"""

NO_EFFECT = {
    "--single_submit": "requests are submitted together as far as the queue has room",
    "--sequential_requests": "requests are in flight together; --queue-depth 1 makes them sequential",
    "--validate": "data is always checked",
    "--include_warmup_time": "the warm-up is never counted",
    "--use_accelerator_pin_memory": "buffers are on huge pages, which makes locking unnecessary",
    "--slow_bounce_buffer": "the buffers are aligned, so nothing is bounced",
    "--different_file_each_iteration": "all files exist and are written before anything is measured; see --files",
    "--flush_page_cache": "the files measured are always taken out of the page cache first; root is not needed",
}
NO_EFFECT_WITH_VALUE = {
    "--io_parallel": "the engine sizes its own threads; see --queue-depth and --files",
    "--multi_process": "one process drives the disk; see --queue-depth and --files",
    "--fast_io_size": "there is one kind of buffer",
    "--engine": "the engine measured is deepoffload's; --backend chooses its system interface",
}
GPU_FLAGS = ("--gpu", "--gds", "--use_gds")
SWEEP_CONFIG_IGNORED = ("sequential_requests", "single_submit", "io_parallel", "overlap_events")


@dataclass(frozen=True)
class Options:
    """What was asked for; ``None`` means not said. Sizes in bytes, times in seconds."""

    paths: tuple[str, ...]
    size_bytes: int | None
    time_limit_s: float
    quick: bool
    full: bool
    backends: tuple[str, ...] | None
    block_bytes: tuple[int, ...] | None
    queue_depths: tuple[int, ...] | None
    direct: tuple[bool, ...] | None
    files: tuple[int, ...] | None
    patterns: tuple[Pattern, ...]
    repeats: int
    warmup: bool
    compare: tuple[str, ...]
    json_file: str | None
    plot_file: str | None
    store: bool
    verbose: bool
    notes: tuple[str, ...]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}\n(ds_nvme_bench --help lists the options)")


def make_parser() -> argparse.ArgumentParser:
    """The parser; :func:`parse_options` checks what it finds."""
    parser = _Parser(
        prog="ds_nvme_bench", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--path", "--folder", "--nvme_dir", "--nvme-dir", dest="paths", action="extend", nargs="+", default=[],
        metavar="DIR", help="directory on the disk; several are measured together, then one by one")  # fmt: skip
    add("--folder_to_device_mapping", dest="mappings", action="extend", nargs="+", default=[], metavar="DIR:DEVICE",
        help=argparse.SUPPRESS)  # fmt: skip
    add("--size", "--io_size", "--io-size", dest="size", metavar="BYTES",
        help="bytes of test files per path, such as 2GiB (default 1 GiB, --quick 256 MiB)")  # fmt: skip
    add("--time-limit", "--time_limit", dest="time_limit", metavar="SECONDS",
        help="about how long the whole run may take (default 90, --quick 20)")  # fmt: skip
    add("--quick", action="store_true", help="under 30 seconds, fewer settings")
    add("--full", action="store_true", help="every combination of what is swept, not only near the usual settings")
    sweep = parser.add_argument_group("what to sweep (several values each; with spaces or commas)")
    _add_sweep(sweep)
    add("--loops", "--repeats", dest="repeats", metavar="N", default="3", help="measurements of a good setting (3)")
    add("--warmup_loops", "--warmup-loops", dest="warmup_loops", metavar="N", default="1",
        help="0: no warm-up before each measurement")  # fmt: skip
    output = parser.add_argument_group("output")
    output.add_argument("--json", dest="json_file", metavar="FILE", help="all results and the machine; - is stdout")
    output.add_argument(
        "--log_dir", "--log-dir", dest="log_dir", metavar="DIR", help="as --json DIR/ds_nvme_bench.json"
    )
    output.add_argument("--plot", dest="plot_file", metavar="FILE.png", help="a picture; needs deepoffload[bench]")
    output.add_argument("--compare", action="append", default=[], choices=COMPARE_TOOLS,
                        help="run the best setting with this tool too, in turns, and print the ratio")  # fmt: skip
    output.add_argument("--no-store", "--no_store", dest="store", action="store_false",
                        help="do not keep the bandwidths for deepoffload")  # fmt: skip
    output.add_argument("--verbose", action="store_true", help="show every setting in the table, not only the best")
    for flag in NO_EFFECT:
        add(flag, dest="no_effect", action="append_const", const=flag, help=argparse.SUPPRESS)
    for flag in NO_EFFECT_WITH_VALUE:
        add(flag, metavar="VALUE", help=argparse.SUPPRESS)
    for flag in GPU_FLAGS:
        add(flag, dest="gpu", action="append_const", const=flag, help=argparse.SUPPRESS)
    return parser


def _add_sweep(sweep: argparse._ArgumentGroup) -> None:
    add = sweep.add_argument
    add("--backend", dest="backends", nargs="+", metavar="NAME", help=f"of {', '.join(BACKENDS)}")
    add("--block-size", "--block_size", dest="blocks", nargs="+", metavar="BYTES", help="such as 256KiB 1MiB 4MiB")
    add("--queue-depth", "--queue_depth", dest="depths", nargs="+", metavar="N", help="blocks in flight, such as 8 32")
    add("--direct", choices=("direct", "buffered", "both"), help="past the page cache, through it, or both")
    add("--files", nargs="+", metavar="N", help="files used at once per path")
    add("--pattern", dest="patterns", nargs="+", metavar="NAME", help="of read, write, mixed (default: all)")
    add("--read", dest="only_read", action="store_true", help="as --pattern read")
    add("--no-read", "--no_read", dest="no_read", action="store_true", help="as --pattern write")
    add("--no-write", "--no_write", dest="no_write", action="store_true", help="as --pattern read")
    add("--sweep_config", "--sweep-config", dest="sweep_config", metavar="JSON",
        help="a file with lists for block_size and queue_depth, as ds_nvme_tune reads it")  # fmt: skip


def parse_options(arguments: Sequence[str] | None) -> Options:
    """Parses and checks; touches no disk.

    Raises:
        ConfigError: naming the flag, what is wrong and what may be said.
        SystemExit: ``--help`` was printed.
    """
    given = make_parser().parse_args(arguments)
    if given.gpu:
        raise ConfigError(f"{given.gpu[0]}: transfers to a GPU are not measured here; bytes go through host memory")
    notes = [f"{flag}: no effect: {NO_EFFECT[flag]}" for flag in given.no_effect or []]
    for flag, why in NO_EFFECT_WITH_VALUE.items():
        if getattr(given, flag.lstrip("-")) is not None:
            notes.append(f"{flag}: no effect: {why}")
    paths = [*given.paths]
    for mapping in given.mappings:
        paths.append(mapping.rpartition(":")[0] or mapping)
        notes.append(f"--folder_to_device_mapping {mapping}: no effect of the device: nothing goes to a GPU")
    if not paths:
        raise ConfigError("--path: name a directory on the disk to measure")
    blocks, depths = _values("--block-size", given.blocks), _values("--queue-depth", given.depths)
    if given.sweep_config:
        blocks, depths = _sweep_config(given.sweep_config, blocks, depths, notes)
    size = None if given.size is None else _size("--size", given.size, PAGE_BYTES)
    block_bytes = None if blocks is None else tuple(_size("--block-size", text, PAGE_BYTES) for text in blocks)
    for block in block_bytes or ():
        if block > REQUEST_BYTES_MAX or block % PAGE_BYTES:
            raise ConfigError(f"--block-size: {block} is not a multiple of {PAGE_BYTES} up to 1 GiB")
        if size is not None and block > size:
            raise ConfigError(f"--block-size: a block of {block} bytes is larger than --size, {size} bytes")
    return Options(
        paths=tuple(paths),
        size_bytes=size,
        time_limit_s=_seconds(given.time_limit, 20.0 if given.quick else 90.0),
        quick=given.quick,
        full=given.full,
        backends=_backends(given.backends),
        block_bytes=None if block_bytes is None else tuple(dict.fromkeys(block_bytes)),
        queue_depths=_integers("--queue-depth", depths, QUEUE_DEPTH_MAX),
        direct={None: None, "direct": (True,), "buffered": (False,), "both": (True, False)}[given.direct],
        files=_integers("--files", _values("--files", given.files), FILES_MAX),
        patterns=_patterns(given),
        repeats=_integer("--repeats", given.repeats, 1, 1000),
        warmup=_integer("--warmup_loops", given.warmup_loops, 0, 1000) > 0,
        compare=tuple(dict.fromkeys(given.compare)),
        json_file=given.json_file or (os.path.join(given.log_dir, "ds_nvme_bench.json") if given.log_dir else None),
        plot_file=given.plot_file,
        store=given.store,
        verbose=given.verbose,
        notes=tuple(notes),
    )


def _values(flag: str, given: Sequence[str] | None) -> list[str] | None:
    """Flattens ``["1M,4M", "8M"]``."""
    if given is None:
        return None
    values = [value for text in given for value in text.split(",") if value]
    if not values:
        raise ConfigError(f"{flag}: no value is given")
    return values


def _size(flag: str, text: str, least: int) -> int:
    """Bytes; DeepSpeed's single letters mean powers of 1024 here as there."""
    written = text.strip()
    if written[-1:].upper() in tuple("KMGT"):
        written += "iB"
    try:
        count = parse_bytes(written)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from error
    if count < least:
        raise ConfigError(f"{flag}: {text} is too small; it is at least {least} bytes")
    return count


def _integer(flag: str, text: str, least: int, most: int) -> int:
    try:
        value = int(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {text!r} is not a whole number") from error
    if not least <= value <= most:
        raise ConfigError(f"{flag}: {value} is not between {least} and {most}")
    return value


def _integers(flag: str, texts: Sequence[str] | None, most: int) -> tuple[int, ...] | None:
    return None if texts is None else tuple(dict.fromkeys(_integer(flag, text, 1, most) for text in texts))


def _seconds(text: str | None, default: float) -> float:
    try:
        value = default if text is None else float(text)
    except ValueError as error:
        raise ConfigError(f"--time-limit: {text!r} is not a number of seconds") from error
    if not 1 <= value <= 86400:
        raise ConfigError(f"--time-limit: {text} is not between 1 and 86400 seconds")
    return value


def _backends(given: Sequence[str] | None) -> tuple[str, ...] | None:
    names = _values("--backend", given)
    for name in names or ():
        if name not in BACKENDS:
            raise ConfigError(f"--backend: {name!r} is unknown; it is one of {', '.join(BACKENDS)}")
    return None if names is None else tuple(dict.fromkeys(names))


def _patterns(given: argparse.Namespace) -> tuple[Pattern, ...]:
    names = _values("--pattern", given.patterns) or [pattern.value for pattern in Pattern]
    known = {pattern.value: pattern for pattern in Pattern}
    for name in names:
        if name not in known:
            raise ConfigError(f"--pattern: {name!r} is unknown; it is one of {', '.join(known)}")
    patterns = tuple(dict.fromkeys(known[name] for name in names))
    if given.only_read or given.no_write:
        patterns = tuple(pattern for pattern in patterns if pattern is Pattern.READ)
    if given.no_read:
        patterns = tuple(pattern for pattern in patterns if pattern is Pattern.WRITE)
    if not patterns:
        raise ConfigError("--read, --no-read, --no-write and --pattern together leave nothing to measure")
    return patterns


def _sweep_config(
    path: str, blocks: list[str] | None, depths: list[str] | None, notes: list[str]
) -> tuple[list[str] | None, list[str] | None]:
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--sweep_config: {path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"--sweep_config: {path} is not a JSON object of lists")
    for key, value in found.items():
        values = [str(item) for item in (value if isinstance(value, list) else [value])]
        if key == "block_size":
            blocks = blocks or values
        elif key == "queue_depth":
            depths = depths or values
        elif key in SWEEP_CONFIG_IGNORED:
            notes.append(f"--sweep_config: {key} has no effect: the engine has no such setting")
        else:
            raise ConfigError(f"--sweep_config: {path}: unknown key {key!r}; it has block_size and queue_depth")
    return blocks, depths
