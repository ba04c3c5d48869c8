"""The simulated GPU finds missing waits, names them, and is silent where the waits are there."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest
import torch

from tests.support.simulated_gpu import pending, settings
from tests.support.simulated_gpu.control import native
from tests.support.waiting import wait_until

Order = Callable[[torch.Stream, torch.Stream], None]


def by_event(done: torch.Stream, then: torch.Stream) -> None:
    then.wait_event(done.record_event())


def by_stream(done: torch.Stream, then: torch.Stream) -> None:
    then.wait_stream(done)


def by_host(done: torch.Stream, then: torch.Stream) -> None:
    done.synchronize()


def by_host_event(done: torch.Stream, then: torch.Stream) -> None:
    done.record_event().synchronize()


def by_device(done: torch.Stream, then: torch.Stream) -> None:
    torch.simgpu.synchronize()


def by_asking(done: torch.Stream, then: torch.Stream) -> None:
    event = done.record_event()
    while not event.query():
        pass


def by_a_third_stream(done: torch.Stream, then: torch.Stream) -> None:
    third = torch.simgpu.Stream()
    third.wait_stream(done)
    then.wait_stream(third)


ORDERS = [by_event, by_stream, by_host, by_host_event, by_device, by_asking, by_a_third_stream]


class Pair:
    """Two streams, and a device buffer and a host buffer that both of them use."""

    def __init__(self) -> None:
        self.first, self.second = torch.simgpu.Stream(), torch.simgpu.Stream()
        self.device = torch.zeros(8, device="simgpu")
        self.host = torch.ones(8).pin_memory()
        torch.simgpu.synchronize()

    def upload(self, stream: torch.Stream) -> None:
        with stream:
            self.device.copy_(self.host, non_blocking=True)

    def download(self, stream: torch.Stream) -> None:
        with stream:
            self.host.copy_(self.device, non_blocking=True)

    def read(self, stream: torch.Stream) -> None:
        with stream:
            self.device + 1

    def write(self, stream: torch.Stream) -> None:
        with stream:
            self.device.mul_(2)


HAZARDS = [
    (Pair.upload, Pair.read, "aten::add", "copy host to device"),
    (Pair.upload, Pair.write, "aten::mul", "copy host to device"),
    (Pair.write, Pair.read, "aten::add", "aten::mul"),
    (Pair.read, Pair.write, "aten::mul", "aten::add"),
    (Pair.read, Pair.upload, "copy host to device", "aten::add"),
    (Pair.write, Pair.download, "copy device to host", "aten::mul"),
    (Pair.download, Pair.write, "aten::mul", "copy device to host"),
    (Pair.download, Pair.upload, "copy host to device", "copy device to host"),
    (Pair.upload, Pair.upload, "copy host to device", "copy host to device"),
]
NAMES = [f"{first.__name__}-{second.__name__}" for first, second, _, _ in HAZARDS]


@pytest.mark.parametrize("mode", ["late", "random", "eager"])
@pytest.mark.parametrize(("first", "second", "name", "earlier"), HAZARDS, ids=NAMES)
def test_a_missing_wait_is_found(
    simulated_gpu: str, mode: str, first: Callable, second: Callable, name: str, earlier: str
) -> None:
    settings(mode)
    pair = Pair()
    first(pair, pair.first)
    with pytest.raises(RuntimeError, match="missing synchronisation") as raised:
        second(pair, pair.second)
    text = str(raised.value)
    assert text.index(f'"{name}"') < text.index(f"of stream {pair.second.stream_id}")
    assert f"of stream {pair.first.stream_id}" in text[text.index(f'which "{earlier}"') :]


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)
@pytest.mark.parametrize("mode", ["late", "random", "eager"])
def test_every_wait_is_enough(simulated_gpu: str, mode: str, order: Order) -> None:
    settings(mode)
    for first, second, _, _ in HAZARDS:
        pair = Pair()
        first(pair, pair.first)
        order(pair.first, pair.second)
        second(pair, pair.second)
        torch.simgpu.synchronize()


def test_a_wait_for_what_came_before_is_not_enough(simulated_gpu: str) -> None:
    pair = Pair()
    pair.upload(pair.first)
    early = pair.first.record_event()
    pair.upload(pair.first)
    pair.second.wait_event(early)
    with pytest.raises(RuntimeError, match="missing synchronisation"):
        pair.read(pair.second)


def test_a_wait_in_the_other_direction_is_not_enough(simulated_gpu: str) -> None:
    pair = Pair()
    pair.upload(pair.first)
    pair.first.wait_stream(pair.second)
    with pytest.raises(RuntimeError, match="missing synchronisation"):
        pair.read(pair.second)


def test_reads_need_no_order(simulated_gpu: str) -> None:
    pair = Pair()
    pair.read(pair.first)
    pair.read(pair.second)
    pair.first.wait_stream(pair.second)
    pair.write(pair.first)


def test_all_readers_must_be_waited_for(simulated_gpu: str) -> None:
    pair = Pair()
    pair.read(pair.first)
    pair.read(pair.second)
    pair.read(torch.simgpu.default_stream())
    third = torch.simgpu.Stream()
    third.wait_stream(pair.second)
    third.wait_stream(torch.simgpu.default_stream())
    with pytest.raises(RuntimeError, match="missing synchronisation"):
        pair.write(third)
    third.wait_stream(pair.first)
    pair.write(third)


def test_ranges_of_one_storage_are_told_apart(simulated_gpu: str) -> None:
    arena = torch.zeros(1000, device=simulated_gpu)
    torch.simgpu.synchronize()
    first, second = torch.simgpu.Stream(), torch.simgpu.Stream()
    with first:
        arena[100:200].fill_(1)
    with second:
        arena[:100].fill_(2)
        arena[200:].fill_(2)
        arena.as_strided((10, 10), (100, 1), 0)[:, :0].fill_(2)
        with pytest.raises(RuntimeError, match="missing synchronisation") as raised:
            arena[150:300].add_(1)
        begin, end = (arena.data_ptr() + 4 * at for at in (150, 200))
        assert f"device bytes [{begin:#x}, {end:#x})" in str(raised.value)


def test_rows_and_columns_are_told_apart(simulated_gpu: str) -> None:
    table = torch.zeros(8, 8, device=simulated_gpu)
    torch.simgpu.synchronize()
    with torch.simgpu.Stream():
        table[:, :4].fill_(1)
    with torch.simgpu.Stream():
        table[:, 4:].fill_(2)
        with pytest.raises(RuntimeError, match="missing synchronisation"):
            table[:, 3:5].sum()


def test_the_host_may_not_write_into_a_copy(simulated_gpu: str) -> None:
    pair = Pair()
    pair.upload(pair.first)
    pair.host[3] = 7
    with pytest.raises(RuntimeError, match="the host wrote into the host memory of .copy host to device"):
        pair.first.synchronize()
    pair.first.synchronize()
    pair.download(pair.first)
    pair.host.zero_()
    with pytest.raises(RuntimeError, match="the host wrote into the host memory of .copy device to host"):
        torch.simgpu.synchronize()


def test_the_streams_may_write_where_a_queued_copy_reads(simulated_gpu: str) -> None:
    pair = Pair()
    pair.upload(pair.first)
    pair.write(pair.first)
    pair.download(pair.first)
    pair.upload(pair.first)
    by_event(pair.first, pair.second)
    pair.write(pair.second)
    pair.download(pair.second)
    pair.second.synchronize()
    assert pair.host.tolist() == [4.0] * 8


def test_what_the_slow_thread_finds_is_raised_by_the_next_call(simulated_gpu: str) -> None:
    settings("random", delay_max_s=0.02)
    pair = Pair()
    pair.upload(pair.first)
    pair.host[0] = 7
    wait_until(lambda: not pending())
    with pytest.raises(RuntimeError, match="the host wrote into the host memory"):
        pair.device + 1
    pair.first.synchronize()


def test_unchecked_hazards_give_wrong_bytes(simulated_gpu: str) -> None:
    settings(check=False)
    pair = Pair()
    pair.upload(pair.first)
    with pair.second:
        wrong = pair.device + 1
    torch.simgpu.synchronize()
    assert wrong.eq(1).all()
    assert pair.device.eq(1).all()


# ---- memory that is freed


def test_freed_memory_that_another_stream_uses_is_a_hazard(simulated_gpu: str) -> None:
    gc.collect()
    torch.simgpu.empty_cache()  # what earlier tests have left would be taken first
    side, source = torch.simgpu.Stream(), torch.ones(1000, device=simulated_gpu)
    side.wait_stream(torch.simgpu.default_stream())
    with side:
        source + 1
    address = source.data_ptr()
    del source
    again = torch.empty(1000, device=simulated_gpu)
    assert again.data_ptr() == address
    with pytest.raises(RuntimeError, match="missing synchronisation"):
        again.zero_()
    torch.simgpu.current_stream().wait_stream(side)
    again.zero_()


def test_record_stream_keeps_freed_memory(simulated_gpu: str) -> None:
    side, source = torch.simgpu.Stream(), torch.ones(1000, device=simulated_gpu)
    to = torch.zeros(1000).pin_memory()
    side.wait_stream(torch.simgpu.default_stream())
    with side:
        to.copy_(source, non_blocking=True)
    source.record_stream(side)
    address = source.data_ptr()
    allocated = torch.simgpu.memory_allocated()
    del source
    assert torch.simgpu.memory_allocated() == allocated
    assert torch.zeros(1000, device=simulated_gpu).data_ptr() != address
    side.synchronize()
    assert to.eq(1).all()
    assert torch.zeros(1000, device=simulated_gpu).data_ptr() == address


def test_recorded_memory_is_in_order_when_it_comes_back(simulated_gpu: str) -> None:
    side, source = torch.simgpu.Stream(), torch.ones(1000, device=simulated_gpu)
    side.wait_stream(torch.simgpu.default_stream())
    with side:
        source + 1
    source.record_stream(side)
    address = source.data_ptr()
    del source
    again = torch.zeros(1000, device=simulated_gpu)
    assert again.data_ptr() == address


def test_freed_memory_of_the_same_stream_is_in_order(simulated_gpu: str) -> None:
    source = torch.ones(1000, device=simulated_gpu)
    torch.simgpu.synchronize()
    to = torch.zeros(1000).pin_memory()
    to.copy_(source, non_blocking=True)
    address = source.data_ptr()
    del source
    again = torch.empty(1000, device=simulated_gpu)
    assert again.data_ptr() == address
    assert pending()
    again.fill_(3)
    torch.simgpu.synchronize()
    assert to.eq(1).all()


def test_host_memory_that_is_gone_is_forgotten(simulated_gpu: str) -> None:
    class Buffer:
        """Host memory at an address of our own choosing."""

        def __init__(self) -> None:
            self.bytes = bytearray(4096)

        def tensor(self) -> torch.Tensor:
            return torch.frombuffer(self.bytes, dtype=torch.float32)

    buffer, device = Buffer(), torch.ones(1024, device=simulated_gpu)
    torch.simgpu.synchronize()
    first, second = torch.simgpu.Stream(), torch.simgpu.Stream()
    temporary = buffer.tensor()
    with first:
        torch.empty_like(device).copy_(temporary, non_blocking=True)
        device + 1
    with second, pytest.raises(RuntimeError, match="missing synchronisation"):
        buffer.tensor().copy_(device, non_blocking=True)
    del temporary
    gc.collect()
    with second:
        buffer.tensor().copy_(device, non_blocking=True)


# ---- bookkeeping


def test_what_everybody_has_seen_is_forgotten(simulated_gpu: str) -> None:
    arena = torch.zeros(100_000, device=simulated_gpu)
    side = torch.simgpu.Stream()
    for step in range(3000):
        arena[2 * step].add_(1)
        if step % 100 == 99:
            side.wait_stream(torch.simgpu.current_stream())
            side.synchronize()
    assert native().noted_ranges() < 600


def test_streams_are_current_in_one_thread_only(simulated_gpu: str) -> None:
    seen: list[torch.Stream] = []
    with torch.simgpu.stream(torch.simgpu.Stream()) as side:
        assert torch.simgpu.current_stream() == side
        thread = threading.Thread(target=lambda: seen.append(torch.simgpu.current_stream()))
        thread.start()
        thread.join()
    assert seen == [torch.simgpu.default_stream()] == [torch.simgpu.current_stream()]


@pytest.mark.parametrize("mode", ["late", "random", "eager"])
def test_many_threads(simulated_gpu: str, mode: str) -> None:
    settings(mode, delay_max_s=0.0005)
    problems: list[BaseException] = []
    weight = torch.arange(64.0, device=simulated_gpu, requires_grad=True)
    torch.simgpu.synchronize()

    def train(number: int) -> None:
        try:
            host = torch.zeros(64).pin_memory()
            with torch.simgpu.Stream():
                for step in range(20):
                    host.fill_(number + step)
                    factor = host.to(simulated_gpu, non_blocking=True)
                    (gradient,) = torch.autograd.grad((weight * factor).sum(), weight)
                    host.copy_(gradient, non_blocking=True)
                    torch.simgpu.current_stream().synchronize()
                    assert host.eq(number + step).all()
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=train, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


def test_devices_wait_for_each_other_in_copies_between_them(simulated_gpu: str) -> None:
    here = torch.ones(8, device="simgpu:0")
    there = here.to("simgpu:1", non_blocking=True)
    here.zero_()
    assert (there + 1).tolist() == [2.0] * 8


def test_page_locked_memory_has_a_limit(simulated_gpu: str) -> None:
    memory = torch.zeros(4096, dtype=torch.uint8)
    settings(pinned_max_bytes=1 << 20)
    assert not memory.is_pinned()
    assert torch.simgpu.host_register(memory.data_ptr(), 4096)
    assert memory.is_pinned()
    assert not torch.simgpu.host_register(memory.data_ptr() + 100, 100)
    assert not torch.simgpu.host_register(memory.data_ptr() + 4096, 1 << 20)
    with pytest.raises(RuntimeError, match="page-locked"):
        torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
    assert torch.simgpu.host_unregister(memory.data_ptr())
    assert not torch.simgpu.host_unregister(memory.data_ptr())
    assert not memory.is_pinned()
