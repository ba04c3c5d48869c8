"""``python -m deepoffload.checkpoint``: look at checkpoints, verify them, and convert them."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence

from deepoffload.checkpoint.block_pool import BLOCK_BYTES, BlockPool
from deepoffload.checkpoint.block_reader import BlockReader
from deepoffload.checkpoint.convert.dcp import read_dcp
from deepoffload.checkpoint.convert.exports import write_torch, write_weights
from deepoffload.checkpoint.convert.output import check_free
from deepoffload.checkpoint.convert.own_reader import open_own, own_folder
from deepoffload.checkpoint.convert.own_writer import write_own
from deepoffload.checkpoint.convert.training_run import TrainingRun
from deepoffload.checkpoint.convert.universal import read_universal, write_universal
from deepoffload.checkpoint.convert.zero import read_zero
from deepoffload.checkpoint.durable_list import durable_states
from deepoffload.checkpoint.file_layout import OPTIMIZER_PREFIX
from deepoffload.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest
from deepoffload.checkpoint.progress import Progress
from deepoffload.checkpoint.saving import SHARD_BYTES
from deepoffload.checkpoint.shards import is_weight_file, shard_bytes
from deepoffload.checkpoint.tags import checked_directory, checked_tag, known_tags, latest_tag
from deepoffload.config.units import format_bytes
from deepoffload.errors import DeepOffloadError, UsageError
from deepoffload.io.engine import IoEngine

log = logging.getLogger("deepoffload")

PROGRAM = "python -m deepoffload.checkpoint"

EXIT_DONE = 0
EXIT_REFUSED = 1


def run(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    parsed = _parser().parse_args(arguments)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        command: Callable[[argparse.Namespace], None] = parsed.command
        command(parsed)
        return EXIT_DONE
    except DeepOffloadError as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return EXIT_REFUSED
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")

    def command(name: str, function: Callable[[argparse.Namespace], None], text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        made.set_defaults(command=function)
        made.add_argument("directory", help="where the checkpoints are")
        made.add_argument("--tag", help="which one; the newest when not said")
        return made

    command("show", _show, "list the checkpoints of a directory and what is in them")
    command("verify", _verify, "read a checkpoint and compare all checksums")
    fp32 = command("to-fp32", _to_fp32, "write the exact fp32 weights as safetensors (Hugging Face layout)")
    torch = command("to-torch", _to_torch, "write model.pt and optimizer.pt for torch.load and torch.optim")
    dcp = command("to-dcp", _to_dcp, "write a checkpoint of torch.distributed.checkpoint")
    universal = command("to-universal", _to_universal, "write a universal checkpoint that DeepSpeed continues from")
    fp32.add_argument("--max-shard-size", default=str(SHARD_BYTES), help="of a file, such as 5GB")
    universal.add_argument("--output-tag", help="global_step<n>_universal when not said")
    for made in (fp32, torch, dcp, universal):
        made.add_argument("output", help="a folder that does not exist, or is empty")
    foreign = (
        command("from-dcp", _from_dcp, "read a checkpoint of torch.distributed.checkpoint"),
        command("from-universal", _from_universal, "read a universal checkpoint of DeepSpeed"),
        command("from-deepspeed", _from_deepspeed, "read a ZeRO-1, 2 or 3 checkpoint of DeepSpeed, of any world size"),
    )
    foreign[0].add_argument("--optimizer", help="directory of the optimizer, where it is stored apart from the model")
    for made in foreign:
        made.add_argument("output", help="the directory of the new checkpoint, which gets a folder per tag")
        made.add_argument("--output-tag", help="global_step<n> when not said")
    return parser


# -- looking ---------------------------------------------------------------------------------------------------------


def _show(parsed: argparse.Namespace) -> None:
    """Lists everything first: what cannot be used is an error at the end."""
    directory = checked_directory(parsed.directory)
    if not os.path.isdir(directory):
        raise UsageError(f"{directory} is no directory")
    if os.path.lexists(os.path.join(directory, MANIFEST_NAME)):
        own_folder(directory, None)  # says that it is a checkpoint itself
    newest = latest_tag(directory)
    tags = known_tags(directory) if parsed.tag is None else [os.path.basename(own_folder(directory, parsed.tag))]
    durable = durable_states(directory) if parsed.tag is None else []
    if not tags and not durable:
        raise UsageError(f"{directory} has no checkpoints (folders with a manifest.json) and no durable state")
    unusable = [state.name for state in durable if not state.usable]
    for state in durable:
        _say(f"{state.name}: {state.text}")
    for tag in tags:
        name = f"{tag}{' (latest)' if tag == newest else ''}"
        try:
            manifest = read_manifest(os.path.join(directory, tag))
        except DeepOffloadError as error:
            _say(f"{name}: cannot be used: {error}")
            unusable.append(tag)
            continue
        _say(f"{name}: {_described(manifest)}")
        if parsed.tag is not None:
            _show_tensors(manifest)
    if unusable:
        raise UsageError(f"{directory}: {len(unusable)} of {len(tags) + len(durable)} cannot be used: {_few(unusable)}")


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _described(manifest: Manifest) -> str:
    weights = state = 0
    for name, record in manifest.files.items():
        weights += record.nbytes if is_weight_file(name) else 0
        state += record.nbytes if name.startswith(OPTIMIZER_PREFIX) else 0
    total = sum(record.nbytes for record in manifest.files.values())
    return (
        f"step {manifest.step}, {format_bytes(total)} in {len(manifest.files)} files (weights {format_bytes(weights)}, "
        f"optimizer {format_bytes(state)}), written by {manifest.written_by[:80]}"
    )


def _show_tensors(manifest: Manifest) -> None:
    for file, tensors in manifest.tensors.items():
        _say(f"  {file}")
        for name, record in tensors.items():
            _say(f"    {name}  {record.dtype}  {list(record.shape)}")


def _verify(parsed: argparse.Namespace) -> None:
    folder = own_folder(parsed.directory, parsed.tag)
    manifest = read_manifest(folder)
    total = sum(record.nbytes for record in manifest.files.values())
    progress = Progress(total, f"verifying {folder}", f"verified {folder}")
    io, pool = IoEngine(block_bytes=BLOCK_BYTES), BlockPool()
    reader = BlockReader(io, pool, folder, manifest, progress.advance)
    try:
        for name in manifest.files:
            reader.verify(name)
    finally:
        reader.close()
        io.close()
        pool.close()
    progress.done()
    _say(f"{folder}: step {manifest.step}, {format_bytes(total)}, every checksum is right")


# -- converting ------------------------------------------------------------------------------------------------------


def _export(parsed: argparse.Namespace, write: Callable[[TrainingRun, Callable[[int], None]], None]) -> None:
    check_free(parsed.output)
    folder = own_folder(parsed.directory, parsed.tag)
    with open_own(folder, lambda _: None) as run:
        progress = Progress(run.nbytes, f"writing {parsed.output}", f"wrote {parsed.output}")
        write(run, progress.advance)
        progress.done()
    _say(f"{folder}: step {run.step}, written to {parsed.output}")


def _to_fp32(parsed: argparse.Namespace) -> None:
    limit = shard_bytes(parsed.max_shard_size)
    _export(parsed, lambda run, progress: write_weights(run, parsed.output, limit, progress))


def _to_torch(parsed: argparse.Namespace) -> None:
    _export(parsed, lambda run, progress: write_torch(run, parsed.output, progress))


def _to_dcp(parsed: argparse.Namespace) -> None:
    from deepoffload.checkpoint.convert.dcp_writer import write_dcp  # imports torch.distributed

    _export(parsed, lambda run, progress: write_dcp(run, parsed.output, progress))


def _to_universal(parsed: argparse.Namespace) -> None:
    def write(run: TrainingRun, progress: Callable[[int], None]) -> None:
        write_universal(run, parsed.output, parsed.output_tag, progress)

    _export(parsed, write)


def _import(parsed: argparse.Namespace, run: TrainingRun) -> None:
    progress = Progress(run.nbytes, f"reading {parsed.directory}", f"converted {parsed.directory}")
    folder = write_own(run, parsed.output, parsed.output_tag, progress.advance)
    progress.done()
    _say(f"{parsed.directory}: {run.source}, step {run.step}, written to {folder}")


def _from_dcp(parsed: argparse.Namespace) -> None:
    folders = [parsed.directory if parsed.tag is None else os.path.join(parsed.directory, checked_tag(parsed.tag))]
    _import(parsed, read_dcp([*folders, *([parsed.optimizer] if parsed.optimizer else [])]))


def _from_universal(parsed: argparse.Namespace) -> None:
    _import(parsed, read_universal(parsed.directory, parsed.tag))


def _from_deepspeed(parsed: argparse.Namespace) -> None:
    _import(parsed, read_zero(parsed.directory, parsed.tag))
