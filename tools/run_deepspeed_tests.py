"""Runs DeepSpeed's own unit tests with ``deepspeed`` meaning ``deepoffload.deepspeed``, and says which pass.

It fetches nothing: DIR is the folder ``tests`` of a checkout of DeepSpeed, with ``unit/`` in it. Every test runs as it
is, in processes of its own. Those of docs/deepspeed_tests.md are::

    DS_UNITTEST_TIMEOUT=100 python tools/run_deepspeed_tests.py DIR

(Where one rank fails a test, the other waits for it. This limit, in seconds, is their harness's; it has 600 otherwise.)

Results are compared with tests/deepspeed/their_tests.json; what differs is printed, and the exit status is 1.
``--write`` puts them into that file.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KNOWN = ROOT / "tests" / "deepspeed" / "their_tests.json"
FILES = (
    "runtime/test_ds_config_dict.py",
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
TIMEOUT_S = 3600
OUTCOMES = ("passed", "failed", "skipped")

Results = dict[str, dict[str, int]]
"""How many cases of each test had which outcome; a test is ``file::Class::function``."""


def run(directory: Path, files: list[str], more: list[str]) -> tuple[Results, dict[str, str]]:
    """Run the tests; the second dict has the last line of the first error of each that fails.

    Raises:
        SystemExit: pytest could not run them.
    """
    ours = [ROOT / "tools" / "as_deepspeed", ROOT, directory, directory / "unit" / "runtime" / "zero"]
    paths = [*map(str, ours), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "LOCAL_SIZE": str(RANKS)}
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "their_tests_plugin"]
        command += ["--rootdir", str(directory), "--basetemp", f"{scratch}/tests", "--junitxml", str(report)]
        command += [*more, *(str(directory / "unit" / file) for file in files)]
        subprocess.run(command, env=environment, cwd=directory, timeout=TIMEOUT_S, check=False)
        if not report.exists():
            raise SystemExit("pytest wrote no report; its output above says why")
        return read(report)


def read(report: Path) -> tuple[Results, dict[str, str]]:
    """What a JUnit file of pytest's says."""
    results: Results = collections.defaultdict(lambda: dict.fromkeys(OUTCOMES, 0))
    errors: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        where = [part for part in case.get("classname", "").split(".") if part]
        test = "::".join([*_file_and_class(where), re.sub(r"\[.*", "", case.get("name", ""))])
        bad = next((case.find(kind) for kind in ("failure", "error") if case.find(kind) is not None), None)
        outcome = "failed" if bad is not None else "skipped" if case.find("skipped") is not None else "passed"
        results[test][outcome] += 1
        if bad is not None:
            errors.setdefault(test, (bad.get("message") or "").strip().splitlines()[0] if bad.get("message") else "")
    return dict(sorted(results.items())), errors


def _file_and_class(parts: list[str]) -> list[str]:
    start = parts.index("unit") + 1 if "unit" in parts else 0
    parts = parts[start:]
    end = next((number for number, part in enumerate(parts, 1) if part.startswith("test_")), len(parts))
    return ["/".join(parts[:end]) + ".py", *parts[end:]]


def page(known: Mapping[str, Mapping[str, Any]]) -> str:
    """The results as the table of docs/deepspeed_tests.md."""
    rows = ["| Test of DeepSpeed | passed | failed | skipped | Why not |", "| --- | --- | --- | --- | --- |"]
    for test, result in sorted(known.items()):
        counts = " | ".join(str(result[outcome] or "") for outcome in OUTCOMES)
        rows.append(f"| `{test}` | {counts} | {result.get('why', '')} |")
    return "\n".join(rows) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path, help="the folder tests of a checkout of DeepSpeed")
    parser.add_argument("--file", action="append", help="only this one of unit/; may be said several times")
    parser.add_argument("--write", action="store_true", help=f"put the results into {KNOWN.relative_to(ROOT)}")
    options, more = parser.parse_known_args()
    if not (options.directory / "unit").is_dir():
        parser.error(f"{options.directory} has no folder unit")
    results, errors = run(options.directory.resolve(), options.file or list(FILES), more)
    known: dict[str, dict[str, Any]] = json.loads(KNOWN.read_text(encoding="utf-8")) if KNOWN.exists() else {}
    found = {test: {**counts, "why": known.get(test, {}).get("why", "")} for test, counts in results.items()}
    print(page(found))
    print("".join(f"{test}: {text}\n" for test, text in errors.items()))
    if options.write:
        KNOWN.write_text(json.dumps({**known, **found}, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        return 0
    changed = [test for test, result in found.items() if known.get(test) != result]
    print("".join(f"not as in {KNOWN.name}: {test}, {known.get(test, 'which is not there')}\n" for test in changed))
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
