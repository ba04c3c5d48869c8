from __future__ import annotations

from dataclasses import replace

import pytest

from deepoffload.config import Config
from deepoffload.config.resolve import DEVICE_SHARE, DISK_SHARE, HOST_SHARE, resolve_budgets
from deepoffload.device import Device, Tier
from deepoffload.errors import BudgetError, ConfigError
from deepoffload.machine import DiskSpace, Machine

GIB = 1 << 30
CPU, GPU = Device.parse("cpu"), Device.parse("cuda:0")
MACHINE = Machine(
    memory_total_bytes=32 * GIB,
    memory_available_bytes=20 * GIB,
    cores=4,
    disks=(DiskSpace("/a", 100 * GIB, 1), DiskSpace("/b", 50 * GIB, 2), DiskSpace("/a/sub", 100 * GIB, 1)),
)


def test_nothing_said_takes_a_share_of_what_is_there():
    budgets = resolve_budgets(Config(), MACHINE, CPU)
    assert (budgets.device_bytes, budgets.host_bytes, budgets.nvme_bytes) == (0, int(20 * GIB * HOST_SHARE), 0)
    assert len(budgets.reasons) == 3 and "70% of the 20.00 GiB available" in budgets.reasons[1]


@pytest.mark.parametrize(
    ("paths", "free"), [(("/a",), 100), (("/a", "/b"), 150), (("/a", "/a/sub"), 100)], ids=["one", "two", "shared"]
)
def test_disk_space_of_one_file_system_counts_once(paths, free):
    assert resolve_budgets(Config(nvme_path=paths), MACHINE, CPU).nvme_bytes == int(free * GIB * DISK_SHARE)


@pytest.mark.parametrize(
    "config",
    [
        Config(nvme_path=("/a",), nvme_budget=0),
        Config(nvme_path=("/a",), offload_param=Tier.HOST, offload_optimizer=Tier.DEVICE),
    ],
)
def test_the_disk_can_be_ruled_out(config):
    assert resolve_budgets(config, MACHINE, CPU).nvme_bytes == 0


def test_on_the_cpu_both_budgets_are_one_pool():
    for device, host, pool in ((None, 3, 3), (2, None, 2), (2, 3, 5), (4, 3, 7)):
        config = Config(device_budget=device and device * GIB, host_budget=host and host * GIB)
        assert resolve_budgets(config, MACHINE, CPU).host_bytes == pool * GIB


def test_on_a_device_with_its_own_memory():
    budgets = resolve_budgets(Config(host_budget=3 * GIB), MACHINE, GPU, device_free_bytes=8 * GIB)
    assert (budgets.device_bytes, budgets.host_bytes) == (8 * GIB * DEVICE_SHARE, 3 * GIB)
    assert resolve_budgets(Config(device_budget=GIB), MACHINE, GPU, 8 * GIB).device_bytes == GIB


def test_a_budget_above_what_is_available_now_is_said_in_the_reasons():
    assert "only 20.00 GiB are available" in resolve_budgets(Config(host_budget=30 * GIB), MACHINE, CPU).reasons[1]


@pytest.mark.parametrize(
    ("config", "device", "message"),
    [
        (Config(host_budget=33 * GIB), CPU, "host_budget is 33.00 GiB, but this process may use 32.00 GiB"),
        (Config(nvme_path=("/a", "/b"), nvme_budget=151 * GIB), CPU, "/a, /b have 150.00 GiB free"),
        (Config(device_budget=9 * GIB), GPU, "device_budget is 9.00 GiB, but cuda:0 has 8.00 GiB free"),
    ],
)
def test_budgets_that_cannot_be(config, device, message):
    with pytest.raises(BudgetError, match=message):
        resolve_budgets(config, MACHINE, device, device_free_bytes=8 * GIB)


def test_memory_that_grows():
    """Refused is what is above the physical or the container's limit; the first of them can be forced."""
    grows = replace(MACHINE, physical_bytes=64 * GIB)
    reasons = resolve_budgets(Config(host_budget=60 * GIB), grows, CPU).reasons
    assert "only 20.00 GiB are available" in reasons[1]
    with pytest.raises(BudgetError, match="may use 64.00 GiB of memory at most.*or set memory_may_grow"):
        resolve_budgets(Config(host_budget=65 * GIB), grows, CPU)
    forced = Config(host_budget=104 * GIB, memory_may_grow=True)
    assert resolve_budgets(forced, grows, CPU).host_bytes == 104 * GIB
    for contained in (replace(grows, container_bytes=48 * GIB), replace(MACHINE, container_bytes=48 * GIB)):
        with pytest.raises(BudgetError, match="may use 48.00 GiB of memory at most; lower host_budget$"):
            resolve_budgets(forced, contained, CPU)


def test_an_unmeasured_path():
    with pytest.raises(ConfigError, match="/c: its free space was not measured"):
        resolve_budgets(Config(nvme_path=("/c",)), MACHINE, CPU)


@pytest.mark.parametrize("name", ["Cuda", "cuda:", "cuda:x", "", "cpu:-1", "cpu:1", "meta"])
def test_unknown_devices(name):
    with pytest.raises(ConfigError, match="cannot be used"):
        Device.parse(name)


def test_tiers_have_an_order():
    assert sorted(Tier, key=lambda tier: tier.distance) == [Tier.DEVICE, Tier.HOST, Tier.NVME]
    assert str(GPU) == "cuda:0" and CPU.shares_host_memory and not GPU.shares_host_memory


def test_the_ranks_of_a_host_share_its_budgets_equally():
    config = Config(host_budget=9 * GIB, nvme_budget=30 * GIB, nvme_path=("/a",))
    budgets = resolve_budgets(config, MACHINE, CPU, host_ranks=3)
    assert (budgets.host_bytes, budgets.nvme_bytes, budgets.host_ranks) == (3 * GIB, 10 * GIB, 3)
    assert "9.00 GiB as the configuration says; 3.00 GiB for each of its 3 ranks" in budgets.reasons[1]
    assert "30.00 GiB as nvme_budget says; 10.00 GiB for each of its 3 ranks" in budgets.reasons[2]
    with pytest.raises(BudgetError, match="host_budget is 33.00 GiB, but this process may use 32.00 GiB"):
        resolve_budgets(Config(host_budget=33 * GIB), MACHINE, CPU, host_ranks=3)
