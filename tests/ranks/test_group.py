"""Who trains together: found, started, or refused before anything is started."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from deepoffload.errors import ConfigError, UsageError
from deepoffload.ranks.collectives import LinkError, connected_within
from deepoffload.ranks.group import open_group
from tests.ranks import grouping
from tests.support.rank_processes import LONG_S, SOON_S, launcher_environment, run_ranks, values_of

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@pytest.mark.parametrize("rank_0_has_store", [False, True])
def test_the_environment_starts_the_group(rank_0_has_store):
    said = values_of(grouping.start_by_environment, 2, rank_0_has_store=rank_0_has_store)
    assert said == [(False, [0, 1], True)] * 2


def test_a_group_of_the_program_is_used_and_left():
    assert values_of(grouping.use_the_programs_group, 2) == [[0, 1]] * 2


def test_the_program_starts_its_group_again(tmp_path):
    assert values_of(grouping.start_again, 2, str(tmp_path)) == [[[0, 1]] * 2] * 2


def test_who_is_never_called_is_an_error_in_time():
    """A rank that looks for this one at an old address does not call it. gloo waits without a limit."""
    called = threading.Event()
    with pytest.raises(LinkError, match="not all have called"):
        connected_within(0.05, called.wait)
    called.set()
    assert connected_within(LONG_S, called.wait) is True
    with pytest.raises(LinkError, match="refused"):
        connected_within(LONG_S, refuse)


def refuse() -> None:
    raise RuntimeError("connection refused")


def test_hosts_are_told_apart():
    for rank, (hosts, local_rank, host_ranks, transport) in enumerate(values_of(grouping.be_on_two_hosts, 4)):
        assert hosts == (0, 0, 1, 1)
        assert (local_rank, host_ranks) == (rank % 2, ((0, 1), (2, 3))[rank // 2])
        assert transport == "group"


def test_a_part_of_the_ranks_trains_a_model_of_its_own():
    values = values_of(grouping.share_the_program_in_two, 4)
    for rank, said in enumerate(values):
        by_group, by_mesh, not_a_member, two_dimensions, told, seconds = said
        assert by_group == [rank % 2, rank % 2 + 2]
        assert by_mesh == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert not_a_member.startswith(f"UsageError: rank {rank} is not in the group that was given")
        assert two_dimensions.startswith("ConfigError: mesh= has 2 dimensions ('stage', 'data')")
        assert "mesh['stage']" in two_dimensions
        start = "rank 1 has failed at reading group=, mesh= and ranks=: "
        wrong = [f"ConfigError: {start}mesh= has 2 dim", f"UsageError: {start}rank 1 is not in the group that was"]
        expected = [*wrong, "nothing"] if rank % 2 else ["nothing"] * 3
        assert all(text.startswith(one) for text, one in zip(told, expected, strict=True)), told
        assert told == values[rank % 2][4] and seconds < SOON_S


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (grouping.give_both, "ConfigError: group= and mesh="),
        (grouping.have_no_backend_for_the_cpu, "ConfigError: the process group has no backend for tensors on cpu (it"),
    ],
)
def test_groups_that_cannot_be_used_are_refused(program, text):
    assert all(said.startswith(text) for said in values_of(program, 2))


def test_a_group_that_the_launcher_does_not_mean_is_refused_unless_it_is_given():
    for rank, (refused, given) in enumerate(values_of(grouping.start_alone_under_a_launcher, 2)):
        assert refused.startswith(f"ConfigError: RANK={rank} and WORLD_SIZE=2 in the environment, but the default")
        assert "rank 0 of 1" in refused
        assert given == "nothing"


def test_a_barrier_of_the_program_does_not_meet_our_transfers():
    assert values_of(grouping.sit_in_a_barrier, 2) == [[0, 1]] * 2


def test_a_rank_that_cannot_be_reached_is_an_error_in_time():
    for _ in range(3):
        (ended, _) = run_ranks(grouping.never_connect, 2, 2.0)
        if "has not met" not in str(ended.value):  # torch's store asks a name server, which may take longer
            break
    assert ended.error is None and ended.seconds < SOON_S, ended
    assert "rank 0 has met the others at tcp://" in ended.value and "GLOO_SOCKET_IFNAME" in ended.value


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"RANK": ""}, "WORLD_SIZE=2 in the environment, but no RANK"),
        ({"RANK": "2"}, "RANK=2 and WORLD_SIZE=2 in the environment contradict"),
        ({"RANK": "one"}, "RANK=one in the environment is not a number"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2, LOCAL_WORLD_SIZE=2, RANK=1 and WORLD_SIZE=2"),
        ({"LOCAL_WORLD_SIZE": "3"}, "LOCAL_RANK=1, LOCAL_WORLD_SIZE=3, RANK=1 and WORLD_SIZE=2"),
        ({"MASTER_ADDR": ""}, "no MASTER_ADDR: where do the ranks meet"),
        ({"MASTER_ADDR": "", "MASTER_PORT": ""}, "no MASTER_ADDR and no MASTER_PORT"),
    ],
)
def test_an_environment_that_contradicts_itself_starts_nothing(changes, text, monkeypatch):
    for name, value in (launcher_environment(1, 2, 29500) | changes).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=text.replace("(", r"\(")):
        open_group(CPU)
    assert not dist.is_initialized()


@pytest.mark.parametrize("world_size", ["", "1", "0", "many"])
def test_one_process_is_alone(world_size, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", world_size)
    assert open_group(CPU) is None
    assert not dist.is_initialized()


def test_what_is_no_group_or_mesh_is_named():
    with pytest.raises(ConfigError, match="mesh= takes .* not str"):
        open_group(CPU, mesh="data")
    with pytest.raises(UsageError, match="torch.distributed has not been started"):
        open_group(CPU, group="data")  # type: ignore[arg-type]


def test_torchrun_starts_it_and_nothing_is_left_to_complain_about():
    command = [sys.executable, "-W", "error::FutureWarning", "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", "-m", "tests.ranks.grouping"],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} of 2, host ranks (0, 1), [0, 1]" for rank in range(2)], (
        done.stdout
    )
    assert "destroy_process_group" not in done.stderr and "Traceback" not in done.stderr, done.stderr
