"""Which settings are measured."""

from __future__ import annotations

import pytest

from deepoffload.cli.nvme.arguments import parse_options
from deepoffload.cli.nvme.job import geometry_of, smallest_file_bytes
from deepoffload.cli.nvme.plan import FLIGHT_MAX_BYTES, make_plan
from deepoffload.cli.nvme.types import Setting
from deepoffload.errors import BudgetError, ConfigError

MIB = 1 << 20
BACKENDS = ("libaio", "io_uring", "pool")


def plan(line="", *, can_direct=True, room_bytes=100 << 30, backends=BACKENDS):
    options = parse_options(["--path", "a", *line.split()])
    return make_plan(options, backends, can_direct=can_direct, room_bytes=room_bytes)


def test_the_usual_setting_comes_first_and_buffered_ones_last():
    settings = plan().settings
    assert settings[0] == Setting("libaio", MIB, 16, True, 1)
    kinds = [setting.direct for setting in settings]
    assert kinds == sorted(kinds, reverse=True) and False in kinds
    assert {setting.backend for setting in settings} == set(BACKENDS)
    assert {setting.files for setting in settings} == {1, 4}
    assert max(setting.flight_bytes for setting in settings) <= FLIGHT_MAX_BYTES
    assert len(plan("--quick").settings) < len(settings) < len(plan("--full").settings)


def test_what_is_named_is_measured_in_all_combinations():
    settings = plan("--block-size 1M 32M --queue-depth 8 64 --direct both --files 1 2 --backend pool --size 64G",
                    backends=("pool",)).settings  # fmt: skip
    assert set(settings) == {
        Setting("pool", block, depth, direct, files)
        for block in (MIB, 32 * MIB)
        for depth in (8, 64)
        for direct in (True, False)
        for files in (1, 2)
    }


def test_one_value_for_everything_is_one_setting():
    assert plan("--block-size 4M --queue-depth 8 --direct direct --files 1", backends=("libaio",)).settings == (
        Setting("libaio", 4 * MIB, 8, True, 1),
    )


def test_where_direct_does_not_work_the_sweep_is_buffered_and_says_so():
    found = plan(can_direct=False)
    assert not any(setting.direct for setting in found.settings) and len(found.settings) > 10
    assert any("page cache" in note for note in found.notes)
    with pytest.raises(ConfigError, match="--direct"):
        plan("--direct direct", can_direct=False)


@pytest.mark.parametrize("line", ["", "--quick", "--full", "--size 300M", "--files 8", "--queue-depth 1 64"])
def test_requests_in_flight_fit_into_the_files(line):
    found = plan(line)
    assert found.settings
    assert max(smallest_file_bytes(setting) for setting in found.settings) <= found.file_bytes
    assert found.file_bytes * found.files_max <= found.size_bytes
    for setting in found.settings:
        geometry = geometry_of(setting)
        assert geometry.request_bytes >= setting.block_bytes
        assert geometry.memory_bytes >= setting.flight_bytes + geometry.request_bytes


def test_settings_that_do_not_fit_are_left_out_with_a_note():
    found = plan("--size 200M --block-size 1M 64M --queue-depth 4")
    assert {setting.block_bytes for setting in found.settings} == {MIB}
    assert any("left out" in note and "--size" in note for note in found.notes)


def test_several_files_are_left_out_where_they_would_crowd_out_a_single_one():
    found = plan("--size 64M --block-size 1M --queue-depth 8")
    assert found.files_max == 1 and {setting.files for setting in found.settings} == {1}
    assert any("several files at once are not measured" in note for note in found.notes)
    assert {setting.files for setting in plan("--size 64M --block-size 1M --queue-depth 8 --files 1 4").settings} == {4}


def test_too_little_is_refused():
    with pytest.raises(ConfigError, match="--size: 8.00 MiB per path is too small"):
        plan("--size 8M --block-size 1M --queue-depth 16")
    with pytest.raises(BudgetError, match="--path: only 10.00 MiB may be used"):
        plan(room_bytes=10 * MIB)


def test_a_disk_with_little_room_gets_smaller_files():
    assert plan(room_bytes=700 * MIB).size_bytes == 350 * MIB
    assert plan("--quick").size_bytes < plan().size_bytes == 1 << 30
