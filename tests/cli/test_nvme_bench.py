"""The whole tool, as a user meets it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepoffload.cli.nvme.main import main
from deepoffload.config import parse_config
from deepoffload.io.engine import IoEngine
from deepoffload.io.probe import measure_bandwidth
from tests.support.disks import tmpfs

SHORT = ["--time-limit", "3", "--size", "64M", "--backend", "pool", "--block-size", "1M", "--queue-depth", "4", "8"]
ROOT = Path(__file__).parents[2]


def run(disk, *arguments):
    return main(["--path", str(disk), *arguments])


def test_the_report_is_whole_and_its_aio_block_loads_as_it_is(disk, tmp_path, capsys):
    out = tmp_path / "out.json"
    more = ["--time-limit", "10", "--direct", "both", "--files", "1", "2"]
    assert run(disk, *SHORT, *more, "--json", str(out)) == 0
    report = json.loads(out.read_text())
    assert set(report["aio"]) == {"backend", "block_size", "queue_depth"}
    config = parse_config({"aio": report["aio"]})
    assert config.aio.backend.value == report["best"]["backend"] == "pool"
    assert config.aio.block_bytes == report["best"]["block_bytes"] == 1 << 20
    assert config.aio.queue_depth == report["best"]["queue_depth"]
    measured = {(r["queue_depth"], r["direct"], r["files"], r["pattern"]) for r in report["results"]}
    wanted = {(d, k, f, p) for d in (4, 8) for k in (True, False) for f in (1, 2) for p in ("read", "write", "mixed")}
    printed, said = capsys.readouterr()
    # on a disk that others keep busy there may be no time for all
    assert measured == wanted or ("not measured for want of time" in said and measured < wanted)
    for result in report["results"]:
        rates = sorted(sample["bytes_per_s"] for sample in result["samples"])
        assert rates[0] <= result["bytes_per_s"] <= rates[-1] and result["cpu_s_per_gb"] >= 0
    assert report["compared_bytes"] > 0 and not report["interrupted"]
    assert report["machine"]["paths"][0]["path"] == str(disk) and report["machine"]["kernel"].startswith("Linux")
    assert "duplex" in printed and "compared byte for byte" in printed
    assert json.loads(printed[printed.rindex('{\n  "aio"') :]) == {"aio": report["aio"]}
    assert list(disk.iterdir()) == []


def test_the_context_loads_the_block(disk, tmp_path, capsys):
    import torch

    import deepoffload

    assert run(disk, *SHORT, "--json", "-") == 0
    report = json.loads(capsys.readouterr().out)
    with deepoffload.offload_context({"aio": report["aio"], "host_budget": "64MiB", "nvme_path": str(disk)}):
        model = torch.nn.Linear(8, 8)
    assert model(torch.ones(1, 8)).shape == (1, 8)


def test_the_engine_then_uses_what_was_measured(disk, tmp_path, capsys):
    out = tmp_path / "out.json"
    assert run(disk, *SHORT, "--json", str(out)) == 0
    report = json.loads(out.read_text())
    assert report["stored"] and "the bandwidths are kept" in capsys.readouterr().out
    engine = IoEngine(backend="pool")
    try:
        known = measure_bandwidth(disk, engine)
        assert engine.stats()["bytes_read"] == 0, "nothing is measured again"
    finally:
        engine.close()
    (bandwidth,) = report["bandwidths"]
    assert (known.read_bytes_per_s, known.overlap) == (bandwidth["read_bytes_per_s"], bandwidth["overlap"])
    rates = {r["pattern"]: r["bytes_per_s"] for r in report["results"]
             if r["queue_depth"] == report["aio"]["queue_depth"] and r["direct"]}  # fmt: skip
    assert known.mixed_bytes_per_s == rates["mixed"]


@pytest.mark.parametrize("allowed", [True, False])
def test_buffers_that_are_not_on_huge_pages_are_noted(disk, tmp_path, allowed):
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not pages.exists() or "[never]" in pages.read_text():
        pytest.skip("transparent huge pages are off")
    program = f"""
import ctypes, sys
from deepoffload.cli.nvme.main import main
PR_SET_THP_DISABLE = 41
assert ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, {int(not allowed)}, 0, 0, 0) == 0
sys.exit(main({["--path", str(disk), "--json", str(tmp_path / "out.json"), "--no-store", *SHORT]!r}))
"""
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    share = json.loads((tmp_path / "out.json").read_text())["huge_page_share"]
    assert (share > 0.9) == allowed == ("lie on huge pages" not in ran.stderr)


def test_no_store_keeps_nothing(disk, cache, capsys):
    assert run(disk, *SHORT, "--no-store") == 0
    assert not cache.exists() and "kept" not in capsys.readouterr().out


def test_a_cache_that_cannot_be_written_is_said(disk, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert run(disk, *SHORT) == 0
    assert "could not be kept" in capsys.readouterr().err


def test_one_pattern_only(disk, tmp_path, capsys):
    out = tmp_path / "out.json"
    assert run(disk, *SHORT, "--read", "--json", str(out)) == 0
    report = json.loads(out.read_text())
    assert {result["pattern"] for result in report["results"]} == {"read"}
    assert report["bandwidths"] == [] and not report["stored"]
    assert "duplex" not in capsys.readouterr().out


def test_several_paths_are_measured_together_and_alone(disk, tmp_path, capsys):
    other = tmp_path / "other"
    other.mkdir()
    out = tmp_path / "out.json"
    assert run(disk, "--path", str(other), *SHORT, "--json", str(out)) == 0
    report = json.loads(out.read_text())
    assert [bandwidth["path"] for bandwidth in report["bandwidths"]] == [str(disk), str(other)]
    assert len(report["machine"]["paths"]) == 2
    assert list(other.iterdir()) == []


def test_nothing_runs_longer_than_it_may(disk, capsys):
    start = time.monotonic()
    assert run(disk, "--quick", "--time-limit", "4") == 0
    assert time.monotonic() - start < 100, "a disk that others keep busy is waited for"
    assert "not measured for want of time" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("where", "words"),
    [("missing", "does not exist"), ("file", "is not a directory"), ("locked", "is not writable")],
)
def test_a_path_that_will_not_do(tmp_path, capsys, where, words):
    (tmp_path / "file").write_text("")
    (tmp_path / "locked").mkdir(mode=0o500)
    if where == "locked" and os.access(tmp_path / "locked", os.W_OK):
        pytest.skip("this user may write everywhere")
    assert run(tmp_path / where, *SHORT) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("where", "words"), [("", "an empty path"), ("/proc", "keeps no files"), ("/sys", "keeps no")])
def test_a_path_that_is_no_place_for_files(tmp_path, monkeypatch, capsys, where, words):
    monkeypatch.chdir(tmp_path)
    assert main(["--path", where, *SHORT]) == 2
    assert capsys.readouterr().err.startswith("ds_nvme_bench: --path: ") and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--size", "100T"], 2, "stay free"),
        (["--size", "8M", "--block-size", "4M"], 2, "too small"),
        (["--json", "/nowhere/x.json"], 2, "--json"),
        (["--queue-depth", "1024", "--block-size", "1GiB", "--size", "4TiB"], 2, "--"),
        (["--json", "{disk}"], 2, "is a directory"),
    ],
)
def test_a_request_that_cannot_be_met(disk, capsys, arguments, code, words):
    assert run(disk, *(argument.format(disk=disk) for argument in arguments)) == code
    assert words in capsys.readouterr().err
    assert list(disk.iterdir()) == []


def test_without_fio_the_comparison_is_refused(disk, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(disk))
    assert run(disk, *SHORT, "--compare", "fio") == 1
    assert "fio is not installed" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
@pytest.mark.parametrize("backend", ["libaio", "pool"])
def test_fio_runs_the_same_pattern(disk, tmp_path, capsys, backend):
    out = tmp_path / "out.json"
    line = ["--compare", "fio", "--backend", backend, "--time-limit", "6", "--json", str(out)]
    assert run(disk, *SHORT, *line) == 0
    comparisons = json.loads(out.read_text())["comparisons"]
    assert [comparison["pattern"] for comparison in comparisons] == ["read", "write", "mixed"]
    for comparison in comparisons:
        assert 0.02 < comparison["ratio"] < 50
        assert all(sample["bytes_per_s"] > 1e6 for sample in comparison["theirs"])
    assert "ratio" in capsys.readouterr().out


def test_without_matplotlib_the_picture_is_refused(disk, capsys):
    code = "import sys; sys.modules['matplotlib'] = None\nfrom deepoffload.cli.nvme.main import main\nsys.exit(main())"
    command = [sys.executable, "-c", code, "--path", str(disk), "--plot", str(disk / "x.png")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "deepoffload[bench]" in done.stderr


def test_the_picture(disk, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "x.png"
    assert run(disk, *SHORT, "--plot", str(picture)) == 0
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def small(tmp_path):
    """A tmpfs of 300 MiB, where we may mount one."""
    with tmpfs(tmp_path / "small", 300) as where:
        yield where


def test_memory_is_no_disk_and_this_is_said(small, tmp_path, capsys):
    out = tmp_path / "out.json"
    assert run(small, *SHORT, "--json", str(out)) == 0
    assert "is memory (tmpfs)" in capsys.readouterr().err
    assert not json.loads(out.read_text())["best"]["direct"]
    assert run(small, *SHORT, "--direct", "direct") == 2
    assert "direct I/O does not work" in capsys.readouterr().err


def test_a_disk_that_is_nearly_full(small, capsys):
    with open(small / "much", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 200 << 20)
    before = os.statvfs(small).f_bfree
    assert run(small, *SHORT) == 2
    assert "stay free" in capsys.readouterr().err
    assert run(small) == 2
    assert "may be used there" in capsys.readouterr().err
    assert os.statvfs(small).f_bfree == before and os.listdir(small) == ["much"]


def start(disk, *arguments):
    command = [sys.executable, "-m", "deepoffload.cli.nvme", "--path", str(disk), *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_until_measuring(process, disk):
    """Returns when the process has test files open on ``disk`` and its engine runs."""
    until = time.monotonic() + 200
    while time.monotonic() < until and process.poll() is None:
        links = [os.path.realpath(link) for link in Path(f"/proc/{process.pid}/fd").iterdir() if os.path.lexists(link)]
        if sum(link.startswith(str(disk)) for link in links) >= 2:
            return
        time.sleep(0.02)
    pytest.fail(f"it never started: {process.communicate()}")


def wait_until_moved(process, nbytes):
    """Returns when the process has moved so many bytes to and from disk: a few settings are done then."""
    until = time.monotonic() + 50
    while time.monotonic() < until and process.poll() is None:
        counters = dict(line.split(": ") for line in Path(f"/proc/{process.pid}/io").read_text().splitlines())
        if int(counters["read_bytes"]) + int(counters["write_bytes"]) >= nbytes:
            return
        time.sleep(0.05)


def test_ctrl_c_says_what_is_known_and_leaves_nothing(disk, tmp_path):
    out = tmp_path / "out.json"
    process = start(disk, "--size", "128M", "--time-limit", "60", "--json", str(out))
    wait_until_measuring(process, disk)
    wait_until_moved(process, 2 << 30)
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=200)
    assert process.returncode == 130 and "Traceback" not in errors and "interrupted" in errors
    report = json.loads(out.read_text())
    assert report["interrupted"] and report["results"]
    assert "MB/s" in printed and list(disk.iterdir()) == []


def test_kill_leaves_nothing(disk):
    process = start(disk, "--size", "128M", "--time-limit", "60")
    wait_until_measuring(process, disk)
    assert list(disk.iterdir()) == [], "the files have no name from the start"
    process.kill()
    process.communicate(timeout=200)
    assert list(disk.iterdir()) == []


def test_a_reader_that_goes_away_is_no_traceback(disk):
    program = [sys.executable, "-m", "deepoffload.cli.nvme", "--path", disk, "--no-store", *SHORT]
    with subprocess.Popen(program, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as bench:
        bench.stdout.close()
        complaints = bench.stderr.read()
        assert bench.wait() == 1
    assert "Traceback" not in complaints and "BrokenPipe" not in complaints
    assert list(disk.iterdir()) == []


def test_help_names_the_options(capsys):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("--path", "--quick", "--json", "--plot", "--compare", "--block-size"))
    assert "--io_parallel" not in printed
