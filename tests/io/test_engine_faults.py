"""Every error of the table, injected: it is reported with its place, and the engine stays usable and can be closed."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from deepoffload.config.parse import parse_config
from deepoffload.errors import ClosedError, ConfigError, IoFailure, IoTimeout, UnsupportedError, UsageError
from deepoffload.io.engine import IoEngine, Priority, choose_backend, probe_backend
from deepoffload.io.ticket import WAIT_SLICE_MS, Ticket
from deepoffload.native.aio import QUEUE_DEPTH_MAX
from tests.support.waiting import wait_until

BLOCK = 64 << 10
FATAL = [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ETIMEDOUT, errno.EFBIG, errno.ENODEV, errno.EREMOTEIO]


def open_file(engine: IoEngine, directory, nbytes: int = 4 << 20):
    file = engine.open_file(directory / "data", create=True, lock=True)
    file.grow(nbytes)
    return file


@pytest.mark.parametrize("code", FATAL, ids=errno.errorcode.get)
@pytest.mark.parametrize("kind", ["read", "write"])
def test_error_names_its_place_and_spares_the_rest(make_engine, memory, tmp_path, backend, code, kind):
    engine = make_engine(
        backend=backend, block_bytes=BLOCK, queue_depth=4, fault_script=f"op={kind} nth=3 errno={code}"
    )
    file = open_file(engine, tmp_path)
    start = getattr(engine, kind)
    bad = start(file, memory.address, 16 * BLOCK, 8192)
    with pytest.raises(IoFailure) as caught:
        bad.wait(100)
    assert caught.value.errno == code
    assert errno.errorcode[code] in str(caught.value)
    assert caught.value.filename == str(tmp_path / "data")
    assert caught.value.offset == 8192 + 2 * BLOCK
    assert caught.value.nbytes == BLOCK
    with pytest.raises(IoFailure, match=errno.errorcode[code]):  # the same answer each time it is asked
        bad.wait()
    assert bad.done()
    for _ in range(3):
        start(file, memory.address, 16 * BLOCK, 0).wait()
    stats = engine.stats()
    assert stats["requests_failed"] == 1 and stats["requests_pending"] == 0


def test_a_direct_transfer_that_is_refused_goes_through_the_page_cache(make_engine, memory, tmp_path, backend):
    engine = make_engine(backend=backend, block_bytes=BLOCK, fault_script=f"nth=3 errno={errno.EINVAL}")
    file = open_file(engine, tmp_path)
    if not file.direct:
        pytest.skip(f"no direct I/O on {tmp_path}")
    memory.buffer[: 16 * BLOCK] = b"x" * 16 * BLOCK
    engine.write(file, memory.address, 16 * BLOCK, 0).wait()
    assert engine.stats()["direct_refused"] == 1
    assert (tmp_path / "data").read_bytes()[: 16 * BLOCK] == b"x" * 16 * BLOCK


def test_a_buffered_transfer_that_is_refused_is_an_error(make_engine, memory, tmp_path, backend):
    engine = make_engine(backend=backend, block_bytes=BLOCK, fault_script=f"nth=3 errno={errno.EINVAL}")
    file = engine.open_file(tmp_path / "data", create=True, direct="off")
    with pytest.raises(IoFailure, match="EINVAL"):
        engine.write(file, memory.address, 16 * BLOCK, 0).wait(100)


def test_the_rest_of_a_failed_request_is_not_sent(make_engine, memory, tmp_path):
    engine = make_engine(backend="pool", block_bytes=4096, queue_depth=1, fault_script=f"nth=2 errno={errno.EIO}")
    file = open_file(engine, tmp_path)
    with pytest.raises(IoFailure, match="EIO"):
        engine.write(file, memory.address, 1 << 20, 0).wait(100)
    assert engine.stats()["chunks_done"] == 1


def test_only_the_first_error_is_kept(make_engine, memory, tmp_path, backend):
    script = f"nth=2 errno={errno.ENOSPC}; nth=4 errno={errno.EIO} delay_ms=50"
    engine = make_engine(backend=backend, block_bytes=BLOCK, queue_depth=8, fault_script=script)
    file = open_file(engine, tmp_path)
    with pytest.raises(IoFailure, match="ENOSPC"):
        engine.write(file, memory.address, 8 * BLOCK, 0).wait(100)


def test_interruptions_that_never_end_become_an_error(make_engine, memory, tmp_path):
    engine = make_engine(backend="pool", fault_script=f"op=write errno={errno.EAGAIN}")
    file = open_file(engine, tmp_path)
    with pytest.raises(IoFailure, match="EAGAIN"):
        engine.write(file, memory.address, 4096, 0).wait(60)
    engine.read(file, memory.address, 4096, 0).wait()


def test_a_write_that_moves_nothing_is_an_error(make_engine, memory, tmp_path):
    engine = make_engine(backend="pool", fault_script="op=write short=0")
    file = open_file(engine, tmp_path)
    with pytest.raises(IoFailure, match="EIO"):
        engine.write(file, memory.address, 4096, 0).wait(100)


def test_waiting_has_a_limit_and_can_go_on(make_engine, memory, tmp_path, backend, gate):
    engine = make_engine(backend=backend, fault_script=f"op=read {gate.word}")
    file = open_file(engine, tmp_path)
    ticket = engine.read(file, memory.address, 4096, 0)
    start = time.monotonic()
    with pytest.raises(IoTimeout, match="still in flight"):
        ticket.wait(0.05)
    assert time.monotonic() - start > 0.04
    assert not ticket.done()
    gate.open()
    ticket.wait(100)
    assert ticket.done()
    ticket.wait()


def test_one_wait_does_not_wait_for_others(make_engine, memory, tmp_path, backend, gate):
    engine = make_engine(backend=backend, fault_script=f"op=read nth=1 {gate.word}")
    file = open_file(engine, tmp_path)
    slow = engine.read(file, memory.address, 4096, 0)
    quick = engine.read(file, memory.address + 4096, 4096, 4096)
    quick.wait(100)
    assert not slow.done()
    gate.open()
    slow.wait(100)


def test_closing_has_a_limit_and_finishes_what_was_submitted(make_engine, memory, tmp_path, gate):
    engine = make_engine(backend="pool", fault_script=f"op=write {gate.word}")
    file = open_file(engine, tmp_path)
    memory.buffer[:4] = b"last"
    idle = engine.open_file(tmp_path / "idle", create=True)
    ticket = engine.write(file, memory.address, 4096, 0)
    with pytest.raises(IoTimeout, match="in flight"):
        engine.close(timeout_s=0.05)
    links = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    assert file.path in links and idle.path not in links
    for refused in (lambda: engine.write(file, memory.address, 4096, 0), lambda: engine.open_file(file.path)):
        with pytest.raises(ClosedError):
            refused()
    idle.close()
    gate.open()
    engine.close(timeout_s=100)
    engine.close()
    assert ticket.done()
    ticket.wait()
    assert (tmp_path / "data").read_bytes()[:4] == b"last"
    with pytest.raises(ClosedError):
        engine.write(file, memory.address, 4096, 0)
    file.close()
    assert set(engine.stats().values()) == {0}


def test_a_dropped_ticket_does_not_stop_its_transfer(make_engine, memory, tmp_path, backend):
    engine = make_engine(backend=backend, fault_script="op=write delay_ms=50")
    file = open_file(engine, tmp_path)
    memory.buffer[:5] = b"still"
    engine.write(file, memory.address, 4096, 0)
    file.close(100)  # waits for requests on it
    assert (tmp_path / "data").read_bytes()[:5] == b"still"


def test_an_error_that_nobody_saw_is_counted(make_engine, memory, tmp_path):
    engine = make_engine(backend="pool", fault_script=f"op=write errno={errno.EIO} delay_ms=50")
    file = open_file(engine, tmp_path)
    engine.write(file, memory.address, 4096, 0)
    file.close(100)
    assert engine.stats()["unobserved_failures"] == 1


def test_cancelling_takes_back_only_what_was_not_sent(make_engine, memory, tmp_path, backend, gate):
    engine = make_engine(backend=backend, queue_depth=1, fault_script=f"op=write {gate.word}")
    file = open_file(engine, tmp_path)
    memory.buffer[:8192] = b"a" * 4096 + b"b" * 4096
    first = engine.write(file, memory.address, 4096, 0)
    wait_until_sent(engine)
    second = engine.write(file, memory.address + 4096, 4096, 4096)
    assert second.cancel()
    assert not first.cancel()
    assert second.done()
    with pytest.raises(IoFailure, match="ECANCELED"):
        second.wait()
    gate.open()
    first.wait(100)
    assert not first.cancel()
    assert (tmp_path / "data").read_bytes()[4096:8192] == bytes(4096)
    assert engine.stats()["requests_cancelled"] == 1


def wait_until_sent(engine: IoEngine) -> None:
    """One chunk is with the backend: what is submitted from now on is queued behind it."""
    wait_until(lambda: engine.stats()["chunks_in_flight"] == 1)


def finish_order(tickets: dict[str, Ticket]) -> list[str]:
    for ticket in tickets.values():
        ticket.wait(100)
    return sorted(tickets, key=lambda name: tickets[name].finished_s)


def test_urgent_and_promoted_requests_overtake(make_engine, memory, tmp_path, backend, gate):
    engine = make_engine(backend=backend, queue_depth=1, fault_script=f"nth=1 {gate.word}")
    file = open_file(engine, tmp_path)
    requests = {"running": engine.read(file, memory.address, 4096, 0)}
    wait_until_sent(engine)
    for number, name in enumerate(["queued", "promoted", "urgent"], start=1):
        priority = Priority.URGENT if name == "urgent" else Priority.NORMAL
        requests[name] = engine.read(file, memory.address + 4096 * number, 4096, 4096 * number, priority=priority)
    requests["promoted"].promote()
    gate.open()
    assert finish_order(requests) == ["running", "urgent", "promoted", "queued"]


def test_reads_and_writes_take_turns(make_engine, memory, tmp_path, backend, gate):
    """A burst of writes submitted first does not make reads wait for all of it, nor the other way round."""
    engine = make_engine(backend=backend, queue_depth=1, fault_script=f"nth=1 {gate.word}")
    file = open_file(engine, tmp_path)
    requests = {}
    for kind in ("write", "read"):
        for number in range(6):
            at = (number + (6 if kind == "read" else 0)) * 4096
            requests[f"{kind}{number}"] = getattr(engine, kind)(file, memory.address + at, 4096, at)
    gate.open()
    order = [name.rstrip("0123456789") for name in finish_order(requests)]
    assert all(order[at] != order[at + 1] for at in range(1, 10)), order


def test_a_full_queue_refuses_after_a_while(make_engine, memory, tmp_path, gate):
    engine = make_engine(backend="pool", pending_max=1, submit_timeout_s=0.1, fault_script=f"op=write {gate.word}")
    file = open_file(engine, tmp_path)
    held = engine.write(file, memory.address, 4096, 0)
    with pytest.raises(IoTimeout, match="no room in the queue"):
        engine.write(file, memory.address, 4096, 0)
    gate.open()
    held.wait(100)
    assert engine.stats()["requests_done"] == 1


def test_a_full_queue_waits_for_room(make_engine, memory, tmp_path, gate):
    engine = make_engine(
        backend="pool", queue_depth=1, pending_max=2, submit_timeout_s=100, fault_script=f"op=write {gate.word}"
    )
    file = open_file(engine, tmp_path)
    first, second = (engine.write(file, memory.address, 4096, 0) for _ in range(2))
    opener = threading.Timer(0.05, gate.open)
    opener.start()
    third = engine.write(file, memory.address, 4096, 0)
    assert first.done(), "the third had to wait for the first"
    for ticket in (second, third):
        ticket.wait(100)
    opener.join()


@pytest.mark.parametrize("blocked", ["wait", "submit", "close"])
def test_other_threads_run_while_a_call_blocks(make_engine, memory, tmp_path, gate, blocked):
    """The interpreter's lock is released: with it held, they would run only between two slices of the wait."""
    engine = make_engine(backend="pool", pending_max=1, fault_script=f"op=write {gate.word}")
    file = open_file(engine, tmp_path)
    ticket = engine.write(file, memory.address, 4096, 0)
    calls = {
        "wait": ticket.wait,
        "submit": lambda: engine.read(file, memory.address, 4096, 0).wait(),
        "close": engine.close,
    }
    thread = threading.Thread(target=calls[blocked])
    thread.start()
    took_s = []
    for _ in range(40):
        start = time.monotonic()
        time.sleep(0.001)
        took_s.append(time.monotonic() - start)
    assert thread.is_alive()
    gate.open()
    thread.join()
    assert sorted(took_s)[10] < WAIT_SLICE_MS / 1000 / 2, "a busy machine makes some of them longer, not most"
    ticket.wait()


def test_requests_of_no_bytes_are_done(make_engine, memory, tmp_path, backend):
    engine = make_engine(backend=backend)
    file = open_file(engine, tmp_path)
    ticket = engine.read(file, memory.address, 0, 0)
    assert ticket.done()
    ticket.wait()


def test_wrong_arguments_are_refused(make_engine, memory, tmp_path):
    engine = make_engine(backend="pool")
    file = open_file(engine, tmp_path)
    for address, nbytes, offset in [(0, 4096, 0), (memory.address, -1, 0), (memory.address, 1, -1)]:
        with pytest.raises(UsageError, match="not aligned|negative"):
            engine.read(file, address, nbytes, offset)
    with pytest.raises(UsageError):
        engine.read(file, memory.address, 1 << 62, 1 << 62)
    with pytest.raises(IoFailure, match="EFAULT"):
        engine.read(file, 4096, 4096, 0).wait(100)
    file.close()
    with pytest.raises(ClosedError, match="closed"):
        engine.read(file, memory.address, 4096, 0)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"backend": "nonsense"}, "aio.backend.*nonsense"),
        ({"queue_depth": 0}, "aio.queue_depth"),
        ({"queue_depth": QUEUE_DEPTH_MAX + 1}, "aio.queue_depth"),
        ({"block_bytes": 1000}, "aio.block_size"),
        ({"block_bytes": 0}, "aio.block_size"),
        ({"pending_max": 0}, "pending_max"),
    ],
)
def test_wrong_options_are_refused(options, match):
    with pytest.raises(ConfigError, match=match):
        IoEngine(**options)


def test_the_configuration_and_the_engine_have_one_limit(make_engine):
    depth = parse_config({"aio": {"queue_depth": QUEUE_DEPTH_MAX}}).aio.queue_depth
    assert make_engine(queue_depth=depth, backend="pool").queue_depth == QUEUE_DEPTH_MAX
    with pytest.raises(ConfigError, match=str(QUEUE_DEPTH_MAX)):
        parse_config({"aio": {"queue_depth": QUEUE_DEPTH_MAX + 1}})


def test_auto_says_what_it_chose_and_why(make_engine):
    engine = make_engine()
    assert engine.backend in ("libaio", "io_uring", "pool")
    assert len(engine.backend_reason) > 10
    assert make_engine(backend="pool").backend_reason.startswith("asked for")


def test_auto_passes_over_a_backend_that_has_no_room_for_the_queue():
    """More requests than fs.aio-max-nr, as on a machine where others have used them up."""
    depth = int(Path("/proc/sys/fs/aio-max-nr").read_text())
    refused = probe_backend("libaio", depth)
    assert not refused.available and "EAGAIN" in refused.reason and "aio-max-nr" in refused.reason
    name, why = choose_backend("auto", depth)
    assert name != "libaio" and "libaio not: EAGAIN" in why
    with pytest.raises(UnsupportedError, match="libaio cannot be started.*aio-max-nr.*aio.backend=auto"):
        choose_backend("libaio", depth)
