"""Runs DeepSpeed's own unit tests with ``deepspeed`` meaning ``deepoffload.deepspeed``, and says which pass.

It fetches nothing: DIR is the folder ``tests`` of a checkout of DeepSpeed, with ``unit/`` in it. Every test runs as it
is, in processes of its own. Those of docs/deepspeed_tests.md are::

    python tools/run_deepspeed_tests.py DIR

Where one rank fails a test, the other may wait for it without end, and the tests' harness then ends the whole run. Here
a case that takes longer than ``--limit-s``, or that ends the run, is one failure, and the run goes on behind it.

Results are compared with tests/deepspeed/their_tests.json; what differs is printed, and the exit status is 1.
``--write`` puts them into that file and into the page.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KNOWN = ROOT / "tests" / "deepspeed" / "their_tests.json"
PAGE = ROOT / "docs" / "deepspeed_tests.md"
BEGIN, END = "<!-- results -->\n", "<!-- end -->"
FILES = (
    "runtime/test_ds_config_dict.py",
    "runtime/test_ds_initialize.py",
    "runtime/test_lr_schedulers.py",
    "runtime/zero/test_zero_context.py",
    "runtime/zero/test_zero_tensor_fragment.py",
    "checkpoint/test_convert_checkpoint.py",
    "checkpoint/test_latest_checkpoint.py",
    "checkpoint/test_lr_scheduler.py",
    "checkpoint/test_other_optimizer.py",
    "checkpoint/test_shared_weights.py",
    "checkpoint/test_sparse.py",
    "checkpoint/test_tag_validation.py",
    "checkpoint/test_zero_optimizer.py",
    "ops/adam/test_adamw.py",
    "ops/adam/test_cpu_adam.py",
    "ops/adagrad/test_cpu_adagrad.py",
    "ops/aio/test_aio.py",
)
RANKS = 2
"""How many ranks a test may have; those with more skip themselves."""
LIMIT_S = 100.0
START_LIMIT_S = 600.0
"""How long pytest may take to collect the tests, and to do what it does between two of them."""
OUTCOMES = ("passed", "failed", "skipped")

Results = dict[str, dict[str, int]]
"""How many cases of each test had which outcome; a test is ``file::Class::function``."""


def run(directory: Path, files: list[str], more: list[str], limit_s: float = LIMIT_S) -> tuple[Results, dict[str, str]]:
    """Run the tests; the second dict has the first line of the first error of each that fails.

    pytest runs in a session of its own. Where a case hangs or ends the process, the session is killed, the case has
    failed, and the next pytest leaves out what has ended.

    Raises:
        SystemExit: pytest could not run them.
    """
    ours = [ROOT / "tools" / "as_deepspeed", ROOT, directory, directory / "unit" / "runtime" / "zero"]
    paths = [*map(str, ours), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "LOCAL_SIZE": str(RANKS)}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    with tempfile.TemporaryDirectory() as scratch:
        progress = Path(scratch) / "progress"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "their_tests_plugin"]
        command += ["--rootdir", str(directory), "--basetemp", f"{scratch}/tests", "--progress", str(progress)]
        command.append("--continue-on-collection-errors")
        command += [*more, *(str(directory / "unit" / file) for file in files)]
        while True:
            before = len(Progress(progress).ended)
            how = _watch(
                subprocess.Popen(command, env=environment, cwd=directory, start_new_session=True), progress, limit_s
            )
            now = Progress(progress)
            if now.collected is None:
                raise SystemExit(f"pytest did not collect the tests ({how}); its output above says why")
            for case in now.begun - now.ended.keys():
                now.add(case, "failed", how)
            if now.collected <= now.ended.keys():
                return results(now)
            if len(now.ended) == before:
                raise SystemExit(f"pytest ran no test of those that are left ({how}); its output above says why")


class Progress:
    """What `their_tests_plugin` has written: a line for each case that begins or ends, and one for the whole list."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.collected: set[str] | None = None
        self.begun: set[str] = set()
        self.ended: dict[str, tuple[str, str]] = {}
        """Outcome and error of each case."""
        written = path.read_text(encoding="utf-8") if path.exists() else ""
        for line in written[: written.rfind("\n") + 1].splitlines():  # the last one may be half written
            entry = json.loads(line)
            if "collected" in entry:
                self.collected = (self.collected or set()) | set(entry["collected"])
            elif "outcome" in entry:
                self.ended[entry["case"]] = entry["outcome"], entry["error"]
            else:
                self.begun.add(entry["case"])

    def add(self, case: str, outcome: str, error: str) -> None:
        self.ended[case] = outcome, error
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"case": case, "outcome": outcome, "error": error}) + "\n")


def _watch(pytest: subprocess.Popen[bytes], progress: Path, limit_s: float) -> str:
    """Wait for pytest, or end it when a case has taken longer than the limit; how it ended, in words."""
    size, since_s, limit = 0, time.monotonic(), START_LIMIT_S
    try:
        while pytest.poll() is None:
            new = progress.stat().st_size if progress.exists() else 0
            if new != size:
                size, since_s = new, time.monotonic()
                now = Progress(progress)
                limit = limit_s if now.begun - now.ended.keys() else START_LIMIT_S
            if time.monotonic() - since_s > limit:
                return f"it did not end within {limit:g} s"
            time.sleep(0.1)
        return f"the run ended in it, with exit status {pytest.returncode}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pytest.pid, signal.SIGKILL)
        pytest.wait()


def results(progress: Progress) -> tuple[Results, dict[str, str]]:
    counts: Results = collections.defaultdict(lambda: dict.fromkeys(OUTCOMES, 0))
    errors: dict[str, str] = {}
    for case, (outcome, error) in progress.ended.items():
        test = re.sub(r"\[.*", "", case).removeprefix("unit/")
        counts[test][outcome] += 1
        if outcome == "failed":
            errors.setdefault(test, error)
    return dict(sorted(counts.items())), errors


def page(known: Mapping[str, Mapping[str, Any]]) -> str:
    """The results as the table of docs/deepspeed_tests.md."""
    rows = ["| Test of DeepSpeed | passed | failed | skipped | Why not |", "| --- | --- | --- | --- | --- |"]
    for test, result in sorted(known.items()):
        counts = " | ".join(str(result[outcome] or "") for outcome in OUTCOMES)
        rows.append(f"| `{test}` | {counts} | {result.get('why', '')} |")
    total = ", ".join(f"{sum(result[outcome] for result in known.values())} {outcome}" for outcome in OUTCOMES)
    return "\n".join(rows) + f"\n\nA test with parameters is several cases. All cases: {total}.\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path, help="the folder tests of a checkout of DeepSpeed")
    parser.add_argument("--file", action="append", help="only this one of unit/; may be said several times")
    parser.add_argument("--write", action="store_true", help=f"put the results into {KNOWN.relative_to(ROOT)}")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds that a case may take (%(default)g)")
    options, more = parser.parse_known_args()
    if not (options.directory / "unit").is_dir():
        parser.error(f"{options.directory} has no folder unit")
    files = options.file or list(FILES)
    counts, errors = run(options.directory.resolve(), files, more, options.limit_s)
    known: dict[str, dict[str, Any]] = json.loads(KNOWN.read_text(encoding="utf-8")) if KNOWN.exists() else {}
    found = {test: {**result, "why": known.get(test, {}).get("why", "")} for test, result in counts.items()}
    print(page(found))
    print("".join(f"{test}: {text}\n" for test, text in errors.items()))
    gone = [test for test in known if test not in found and test.partition("::")[0] in files and not more]
    changed = [test for test, result in found.items() if known.get(test) != result]
    print("".join(f"not as in {KNOWN.name}: {test}, {known.get(test, 'which is not there')}\n" for test in changed))
    print("".join(f"in {KNOWN.name}, and not found: {test}\n" for test in gone))
    if options.write:
        write({test: result for test, result in {**known, **found}.items() if test not in gone})
        return 0
    return 1 if changed or gone else 0


def write(known: Mapping[str, Mapping[str, Any]]) -> None:
    """Put the results into the file and the page; print the tests that want a reason."""
    KNOWN.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(head + BEGIN + page(known) + END + rest.partition(END)[2], encoding="utf-8")
    bare = [test for test, result in known.items() if (result["failed"] or result["skipped"]) and not result["why"]]
    print("".join(f"{KNOWN.name} gives no reason: {test}\n" for test in bare))


if __name__ == "__main__":
    sys.exit(main())
