"""What the simulated GPU promises: each test fails on a simulator that does not keep the promise."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys

import pytest
import torch

from tests.support.simulated_gpu import pending, settings
from tests.support.waiting import wait_until


def host(*values: float) -> torch.Tensor:
    """Page-locked."""
    return torch.tensor(values).pin_memory()


def copy_on(stream: torch.Stream, to: torch.Tensor, source: torch.Tensor) -> None:
    with stream:
        to.copy_(source, non_blocking=True)


# ---- memory


def test_the_host_cannot_touch_device_memory(simulated_gpu: str) -> None:
    program = (
        "import ctypes, torch; from tests.support.simulated_gpu import install; install();"
        "tensor = torch.ones(4, device='simgpu'); print('made', flush=True);"
        "ctypes.string_at(tensor.data_ptr(), 1)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "made\n"
    assert done.returncode == -11
    own = host(1.0)
    assert ctypes.string_at(own.data_ptr(), 4) == own.numpy().tobytes()


def test_memory_is_counted_in_exact_sizes(simulated_gpu: str) -> None:
    before = torch.simgpu.memory_allocated()
    torch.simgpu.reset_peak_memory_stats()
    tensors = [torch.empty(count, dtype=torch.uint8, device=simulated_gpu) for count in (1, 512, 513)]
    assert torch.simgpu.memory_allocated() - before == 512 + 512 + 1024
    del tensors
    assert torch.simgpu.memory_allocated() == before
    assert torch.simgpu.max_memory_allocated() - before == 2048
    assert torch.accelerator.memory_allocated() == before


def test_results_of_operators_take_device_memory(simulated_gpu: str) -> None:
    a = torch.ones(1024, device=simulated_gpu)
    before = torch.simgpu.memory_allocated()
    kept = [a + 1, a.view(2, 512), a[3:], a.sort()]
    assert torch.simgpu.memory_allocated() - before == 4096 + 4096 + 8192
    assert [each.device for each in kept[:3]] == [a.device] * 3


def test_out_of_memory(simulated_gpu: str) -> None:
    free, total = torch.simgpu.mem_get_info()
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        torch.empty(total + 1, dtype=torch.uint8, device=simulated_gpu)
    torch.simgpu.empty_cache()
    limit = torch.simgpu.memory_allocated() + (1 << 20)
    torch.simgpu.set_per_process_memory_fraction(limit / total)
    try:
        half = torch.empty(1 << 19, dtype=torch.uint8, device=simulated_gpu)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty((1 << 19) + 1025, dtype=torch.uint8, device=simulated_gpu)
        del half
        torch.empty((1 << 19) + 1025, dtype=torch.uint8, device=simulated_gpu)
    finally:
        torch.simgpu.set_per_process_memory_fraction(1.0)


def test_new_and_freed_memory_hold_nothing_useful(simulated_gpu: str) -> None:
    never_used = torch.empty(1 << 24, device=simulated_gpu)
    assert never_used.isnan().all()
    del never_used
    used = torch.ones(1000, device=simulated_gpu)
    address = used.data_ptr()
    del used
    again = torch.empty(1000, device=simulated_gpu)
    assert again.data_ptr() == address
    assert again.isnan().all()


def test_storages_can_be_emptied_and_filled_again(simulated_gpu: str) -> None:
    tensor = torch.arange(1000.0, device=simulated_gpu)
    before = torch.simgpu.memory_allocated()
    tensor.untyped_storage().resize_(0)
    assert before - torch.simgpu.memory_allocated() == 4096
    tensor.untyped_storage().resize_(4000)
    assert tensor.copy_(torch.arange(1000.0)).sum().item() == 499500.0


def test_memory_stays_with_its_stream_until_the_cache_is_emptied(simulated_gpu: str) -> None:
    torch.simgpu.empty_cache()
    side = torch.simgpu.Stream()
    with side:
        address = torch.empty(1000, device=simulated_gpu).data_ptr()
    assert torch.empty(1000, device=simulated_gpu).data_ptr() != address
    with side:
        assert torch.empty(1000, device=simulated_gpu).data_ptr() == address
    assert torch.simgpu.memory_reserved() > torch.simgpu.memory_allocated()
    torch.simgpu.empty_cache()
    assert torch.simgpu.memory_reserved() == torch.simgpu.memory_allocated()


def test_devices_and_the_host_do_not_mix(simulated_gpu: str) -> None:
    here, there = torch.ones(2, device="simgpu:0"), torch.ones(2, device="simgpu:1")
    for other in (there, torch.ones(2)):
        with pytest.raises(RuntimeError, match="same device"):
            torch.mv(here.view(1, 2), other)
    assert (here + torch.tensor(2.0)).tolist() == [3.0, 3.0]
    assert (here + there.to(here.device)).tolist() == [2.0, 2.0]
    assert torch.simgpu.device_count() == 2
    with torch.simgpu.device(1):
        assert torch.empty(1, device=simulated_gpu).device.index == torch.simgpu.current_device() == 1
    assert torch.simgpu.current_device() == 0


# ---- copies happen late


def test_an_upload_reads_what_the_host_wrote_meanwhile(simulated_gpu: str) -> None:
    settings(check=False)
    side, source, to = torch.simgpu.Stream(), host(1.0), torch.zeros(1, device=simulated_gpu)
    torch.simgpu.synchronize()
    copy_on(side, to, source)
    assert [name for _, name in pending()] == ["copy host to device"]
    source.fill_(2)
    side.synchronize()
    assert to.item() == 2.0
    copy_on(side, to, source)
    side.synchronize()
    source.fill_(3)
    assert to.item() == 2.0


@pytest.mark.parametrize("pinned", [True, False])
def test_a_download_is_not_there_before_it_was_waited_for(simulated_gpu: str, pinned: bool) -> None:
    to = host(5.0) if pinned else torch.tensor([5.0])
    to.copy_(torch.ones(1, device=simulated_gpu), non_blocking=True)
    assert to.isnan().all()
    event = torch.simgpu.current_stream().record_event()
    assert to.isnan().all()
    event.synchronize()
    assert to.item() == 1.0


def test_copies_that_block_are_there_at_once(simulated_gpu: str) -> None:
    device = torch.arange(6.0).to(simulated_gpu)
    assert device.cpu().tolist() == device.tolist() == [0, 1, 2, 3, 4, 5]
    with torch.simgpu.Stream() as side:
        side.wait_stream(torch.simgpu.default_stream())
        late = device.to("cpu", non_blocking=True)
        assert late.is_pinned()
        assert device.to("cpu").tolist() == late.tolist()
    assert not pending()


def test_operators_wait_for_copies_of_their_own_stream_only(simulated_gpu: str) -> None:
    mine, other = torch.zeros(1, device=simulated_gpu), torch.zeros(1, device=simulated_gpu)
    torch.simgpu.synchronize()
    side = torch.simgpu.Stream()
    copy_on(side, other, host(1.0))
    mine.copy_(host(2.0), non_blocking=True)
    assert len(pending()) == 2
    doubled = mine * 2
    assert [stream for stream, _ in pending()] == [side.stream_id]
    assert doubled.item() == 4.0


def test_an_event_moves_only_what_was_queued_before_it(simulated_gpu: str) -> None:
    to = torch.zeros(2, device=simulated_gpu)
    torch.simgpu.synchronize()
    side = torch.simgpu.Stream()
    copy_on(side, to[:1], host(1.0))
    event = side.record_event()
    copy_on(side, to[1:], host(2.0))
    event.synchronize()
    assert len(pending()) == 1
    assert event.query()
    side.synchronize()
    assert to.tolist() == [1.0, 2.0]


def test_an_event_that_is_asked_again_and_again_is_over_in_the_end(simulated_gpu: str) -> None:
    to = torch.zeros(1, device=simulated_gpu)
    assert torch.simgpu.Event().query()
    to.copy_(host(1.0), non_blocking=True)
    event = torch.simgpu.current_stream().record_event()
    answers = [event.query()]
    while not answers[-1]:
        answers.append(event.query())
    assert len(answers) > 1
    assert to.item() == 1.0


def test_time_between_events(simulated_gpu: str) -> None:
    first, second = (torch.simgpu.Event(enable_timing=True) for _ in range(2))
    to = torch.zeros(1, device=simulated_gpu)
    first.record()
    to.copy_(host(1.0), non_blocking=True)
    second.record()
    with pytest.raises(RuntimeError, match="completed"):
        first.elapsed_time(second)
    second.synchronize()
    assert first.elapsed_time(second) >= 0


def test_waits_between_streams_reach_through(simulated_gpu: str) -> None:
    first, second, third = (torch.simgpu.Stream() for _ in range(3))
    a, b = torch.zeros(1, device=simulated_gpu), torch.zeros(1, device=simulated_gpu)
    torch.simgpu.synchronize()
    copy_on(first, a, host(7.0))
    second.wait_stream(first)
    copy_on(second, b, a)
    third.wait_event(second.record_event())
    assert len(pending()) == 2
    with third:
        assert (b + a).item() == 14.0


def test_host_memory_lives_as_long_as_its_copy(simulated_gpu: str) -> None:
    to = torch.zeros(100_000, device=simulated_gpu)
    to.copy_(torch.ones(100_000), non_blocking=True)
    gc.collect()
    other = torch.full((100_000,), 2.0)
    assert to.eq(1).all()
    assert other.eq(2).all()


def test_casts_and_strides_in_copies(simulated_gpu: str) -> None:
    source = torch.arange(12.0).view(3, 4)
    to = torch.zeros(4, 3, dtype=torch.bfloat16, device=simulated_gpu)
    to.copy_(source.t(), non_blocking=True)
    back = torch.zeros(3, 4)
    back.copy_(to.t(), non_blocking=True)
    torch.simgpu.synchronize()
    assert torch.equal(back, source)
    column = torch.zeros(3, 4)
    column[:, 1].copy_(to.t()[:, 2], non_blocking=True)
    torch.simgpu.synchronize()
    assert column.tolist() == [[0, 2, 0, 0], [0, 6, 0, 0], [0, 10, 0, 0]]


@pytest.mark.parametrize("seed", range(3))
def test_random_delays_keep_the_order_that_is_asked_for(simulated_gpu: str, seed: int) -> None:
    settings("random", seed=seed, delay_max_s=0.001)
    streams = [torch.simgpu.Stream() for _ in range(3)]
    value = torch.zeros(1, device=simulated_gpu)
    for step in range(9):
        stream = streams[step % 3]
        stream.wait_stream(streams[step % 3 - 1] if step else torch.simgpu.default_stream())
        with stream:
            value.copy_(host(float(step)), non_blocking=True)
            value += 1
    torch.simgpu.current_stream().wait_stream(streams[2])
    assert value.item() == 9.0


def test_a_slow_stream_moves_by_itself(simulated_gpu: str) -> None:
    settings("random", delay_max_s=0.001)
    to = torch.zeros(1, device=simulated_gpu)
    source = host(1.0)
    torch.simgpu.synchronize()
    to.copy_(source, non_blocking=True)
    wait_until(lambda: not pending())


def test_eager_queues_nothing(simulated_gpu: str) -> None:
    settings("eager")
    to = torch.zeros(1, device=simulated_gpu)
    to.copy_(host(1.0), non_blocking=True)
    back = to.to("cpu", non_blocking=True)
    assert not pending()
    assert back.item() == 1.0
