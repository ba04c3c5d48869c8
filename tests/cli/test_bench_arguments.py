"""The command line: what is accepted, as what, and what is refused."""

from __future__ import annotations

import json

import pytest

from deepoffload.cli.nvme.arguments import parse_options
from deepoffload.cli.nvme.types import Pattern
from deepoffload.errors import ConfigError

MIB = 1 << 20


def test_defaults_leave_the_sweep_to_the_plan():
    options = parse_options(["--path", "/tmp"])
    assert options.paths == ("/tmp",)
    assert (options.backends, options.block_bytes, options.queue_depths, options.direct, options.files) == (None,) * 5
    assert options.patterns == tuple(Pattern)
    assert options.time_limit_s == 90 and options.repeats == 3 and options.warmup and options.store
    assert parse_options(["--path", "/tmp", "--quick"]).time_limit_s < 30


def test_lists_may_have_commas_or_spaces_and_name_nothing_twice():
    options = parse_options(
        ["--path", "a", "--path", "b", "c", "--block-size", "1M,4MiB", "1048576", "--queue-depth", "8", "32,8"]
    )
    assert options.paths == ("a", "b", "c")
    assert options.block_bytes == (MIB, 4 * MIB)
    assert options.queue_depths == (8, 32)


def test_the_flags_of_ds_io():
    line = "--folder d --io_size 400M --read --block_size 1M --queue_depth 32 --loops 5 --warmup_loops 0 --validate"
    options = parse_options([*line.split(), "--io_parallel", "4", "--single_submit", "--engine", "aio_handle"])
    assert options.paths == ("d",) and options.size_bytes == 400 * MIB
    assert options.patterns == (Pattern.READ,)
    assert (options.block_bytes, options.queue_depths, options.repeats, options.warmup) == ((MIB,), (32,), 5, False)
    told = " ".join(options.notes)
    assert all(flag in told for flag in ("--validate", "--io_parallel", "--single_submit", "--engine"))


def test_a_folder_mapping_names_the_folder():
    options = parse_options(["--folder_to_device_mapping", "/mnt/a:0", "/mnt/b:1"])
    assert options.paths == ("/mnt/a", "/mnt/b")
    assert len(options.notes) == 2


def test_the_flags_of_ds_nvme_tune(tmp_path):
    sweep = tmp_path / "sweep.json"
    sweep.write_text(json.dumps({"block_size": ["1M", "8M"], "queue_depth": [32, 128], "io_parallel": [1, 2]}))
    line = f"--nvme_dir a b --sweep_config {sweep} --no_write --log_dir logs --flush_page_cache"
    options = parse_options(line.split())
    assert options.paths == ("a", "b")
    assert (options.block_bytes, options.queue_depths) == ((MIB, 8 * MIB), (32, 128))
    assert options.patterns == (Pattern.READ,)
    assert options.json_file == "logs/ds_nvme_bench.json"
    assert any("io_parallel" in note for note in options.notes)
    assert parse_options(["--path", "a", "--no_read"]).patterns == (Pattern.WRITE,)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", ["--path"]),
        ("--path a --size 0", ["--size", "too small"]),
        ("--path a --size=-5", ["--size", "-5"]),
        ("--path a --size -5", ["--size", "-5"]),
        ("--path a --size much", ["--size", "much"]),
        ("--path a --block-size 0", ["--block-size", "too small"]),
        ("--path a --block-size 5000", ["--block-size", "4096"]),
        ("--path a --block-size 2GiB", ["--block-size", "1 GiB"]),
        ("--path a --block-size 8M --size 4M", ["--block-size", "larger than --size"]),
        ("--path a --block-size ,", ["--block-size", "no value"]),
        ("--path a --queue-depth 0", ["--queue-depth", "between 1 and"]),
        ("--path a --queue-depth many", ["--queue-depth", "'many'"]),
        ("--path a --files 0", ["--files", "between"]),
        ("--path a --backend psync", ["--backend", "psync", "libaio"]),
        ("--path a --pattern random", ["--pattern", "random", "mixed"]),
        ("--path a --direct maybe", ["--direct", "maybe"]),
        ("--path a --repeats 0", ["--repeats", "between"]),
        ("--path a --time-limit 0", ["--time-limit", "between"]),
        ("--path a --time-limit soon", ["--time-limit", "soon"]),
        ("--path a --time-limit nan", ["--time-limit", "nan"]),
        ("--path a --no_read --no_write", ["nothing to measure"]),
        ("--path a --read --pattern write", ["nothing to measure"]),
        ("--path a --gpu", ["--gpu", "host memory"]),
        ("--path a --use_gds", ["--use_gds"]),
        ("--path a --compare dd", ["--compare", "fio"]),
        ("--path a --bogus", ["--bogus"]),
        ("--path a --sweep_config /nowhere.json", ["--sweep_config", "/nowhere.json"]),
    ],
)
def test_mistakes_are_refused_by_name(line, words):
    with pytest.raises(ConfigError) as refused:
        parse_options(line.split())
    assert all(word in str(refused.value) for word in words), str(refused.value)


@pytest.mark.parametrize("text", ["[1]", '{"blocksize": 1}', "{"])
def test_a_wrong_sweep_file_is_refused(tmp_path, text):
    (tmp_path / "sweep.json").write_text(text)
    with pytest.raises(ConfigError, match="--sweep_config"):
        parse_options(["--path", "a", "--sweep_config", str(tmp_path / "sweep.json")])
