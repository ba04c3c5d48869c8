"""Memory of conversions: a few MiB, however large the tensors are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.programs import Programs

MIB = 1 << 20
ALLOWED_BYTES = 50 * MIB
"""Blocks on their way, pieces that are converted, Python's own objects. One array of the run alone takes more."""

PROGRAM = """
import json, sys
from collections import OrderedDict
from pathlib import Path
import torch
from deepoffload.checkpoint.convert.commands import run as command
from deepoffload.checkpoint.convert.tensors import Computed
from deepoffload.checkpoint.convert.torch_writer import Streamed, write_torch_file
from deepoffload.checkpoint.convert.training_run import GroupOfParams, TrainingRun
from deepoffload.checkpoint.convert.own_writer import write_own
from tests.support.memory_watch import MemoryWatch, give_back, resident_bytes

place = Path(sys.argv[1])
torch.set_num_threads(1)

def values(rows, seed):
    def read(start, numel):
        return (torch.arange(start, start + numel, dtype=torch.int64) * 7919 % 1009).float() + seed
    return Computed(torch.float32, (rows, 1000), read)

def make(rows, folder):
    names = {"one": rows, "two": 10}
    weights = {name: values(count, 0.5) for name, count in names.items()}
    arrays = {name: {"exp_avg": values(count, 0.1), "exp_avg_sq": values(count, 0.2)} for name, count in names.items()}
    groups = [GroupOfParams({"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}, list(names))]
    small = {name: {"step": 3.0} for name in names}
    made = TrainingRun("a test", 3, weights, kind="adam", groups=groups, arrays=arrays, small=small)
    write_own(made, str(folder / "own"), None, lambda nbytes: None)
    zero = folder / "zero3"
    zero.mkdir()
    flat = lambda seed: Streamed(Computed(torch.float32, ((rows + 10) * 1000,), values(rows + 10, seed).read))
    state = {0: {"step": 3, "exp_avg": flat(0.1), "exp_avg_sq": flat(0.2)}}
    optimizer = {"zero_stage": 3, "partition_count": 1, "fp32_flat_groups": [flat(0.5)]}
    optimizer["optimizer_state_dict"] = {"state": state, "param_groups": [{"lr": 0.1, "params": [0]}]}
    nothing = lambda nbytes: None
    write_torch_file(
        str(zero / "zero_pp_rank_0_mp_rank_00_optim_states.pt"), {"optimizer_state_dict": optimizer}, nothing)
    shapes = [OrderedDict((name, torch.Size((count, 1000))) for name, count in names.items())]
    model = {"module": {}, "buffer_names": [], "param_shapes": shapes, "global_steps": 3, "shared_params": {}}
    write_torch_file(str(zero / "zero_pp_rank_0_mp_rank_00_model_states.pt"), model, nothing)

def convert(folder):
    own = str(folder / "own")
    for name in ("to-fp32", "to-torch", "to-dcp", "to-universal"):
        assert command([name, own, str(folder / name)]) == 0
        yield name
    back = {"from-dcp": "to-dcp", "from-universal": "to-universal", "from-deepspeed": "zero3"}
    for name, source in back.items():
        assert command([name, str(folder / source), str(folder / name)]) == 0
        yield name
    assert command(["verify", own]) == 0
    yield "verify"

small, large = place / "small", place / "large"
for folder, rows in ((small, 10), (large, int(sys.argv[2]))):
    folder.mkdir()
    make(rows, folder)
list(convert(small))
give_back()
before, watch = resident_bytes(), MemoryWatch()
peaks = {name: watch.take_peak() - before for name in convert(large)}
sums = {str(path.relative_to(large)): path.stat().st_size for path in large.rglob("model.pt")}
print(json.dumps({"peaks": peaks, "sums": sums}))
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_tensors(programs: Programs, tmp_path: Path) -> None:
    rows = 14_000  # 14 M elements in the large one of two parameters: 53 MiB for each of its three arrays
    done = programs.run(PROGRAM, str(tmp_path), str(rows), timeout_s=280)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    print({name: round(peak / MIB, 1) for name, peak in seen["peaks"].items()})
    assert seen["sums"]["to-torch/model.pt"] > rows * 1000 * 4
    assert len(seen["peaks"]) == 8
    for name, peak in seen["peaks"].items():
        assert peak < ALLOWED_BYTES, f"{name}: {peak / MIB:.1f} MiB"
