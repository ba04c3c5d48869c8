"""Writes the page for people who come from DeepSpeed: ``python -m deepoffload.deepspeed.reference >
docs/from_deepspeed.md``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

from deepoffload.config.deepspeed_keys import DEEPSPEED_KEYS
from deepoffload.config.deepspeed_tool_keys import DEEPSPEED_TOOL_KEYS
from deepoffload.config.keys import Treatment
from deepoffload.deepspeed.engine_table import ENGINE_NAMES
from deepoffload.deepspeed.names import PeerName, Presence
from deepoffload.deepspeed.package_table import PACKAGE_NAMES

_HEAD = """\
# From DeepSpeed

<!-- Written by `python -m deepoffload.deepspeed.reference > docs/from_deepspeed.md`; do not edit. -->

Change one import, and keep the script and its JSON file:

```python
import deepoffload.deepspeed as deepspeed
```

`from deepspeed.ops.adam import DeepSpeedCPUAdam` becomes `from deepoffload.deepspeed.ops.adam import
DeepSpeedCPUAdam`, and so on. The names are those of DeepSpeed 0.19.8. One that is not here can be imported from
the modules that scripts use, and raises an error that says what to use when it is called. On the engine such a name is
an error at once, and `hasattr` is false.

## What is different

- **Placement follows from budgets.** `device_budget`, `host_budget`, `nvme_budget` and `nvme_path` stand next to
  DeepSpeed's keys in the same file. Buffer counts, bucket sizes and thresholds set nothing.
  `engine.placement_table()` shows what went where.
- **The stage does not change what is offloaded.** `zero_optimization_stage()` says what the file says; with several
  ranks it says 1 for 0.
- **State dicts are whole on every rank**: `engine.module.state_dict()` and `engine.optimizer.state_dict()` show all
  values, not the rank's part. They hold no memory. All ranks load what one of them has saved ([several
  ranks](ranks.md#saving-and-loading)).
- **Parameters look whole.** Their shape, values and gradients can be read and written at any time.
  `GatheredParameters` marks them, and edits are kept with and without `modifier_rank`. With several ranks
  `modifier_rank` says whose edits all of them get.
- **A parameter without a gradient is not updated**, as in PyTorch: its weights and moments stay. ZeRO takes its
  gradient as zero, so that momentum and weight decay go on. An expert without tokens is such a parameter.
- **`safe_set_full_fp32_param`** sets the weight that the next forward uses. In DeepSpeed the next step does that.
- **`ds_status`** is `AVAILABLE` inside `GatheredParameters` only. Elsewhere it is `NOT_AVAILABLE`, or `INFLIGHT`
  while the bytes are read. In the call of a module, parameters are ordinary ones without `ds_*` names. All `ds_*`
  names are read-only.
- **`zero.Init` needs the configuration** that `initialize` gets, as `config_dict_or_path`: the model is placed when
  the context ends.
- **Several ranks start with rank 0's weights**, as with DeepSpeed, and with its buffers. In `offload_context` and
  `deepoffload.initialize` ranks that have built different values are an error.
- **Several models in one `zero.Init`** share its memory. Each engine saves and loads its own. The memory goes back
  when the last of them is destroyed.
- **fp32 masters are exact**, with every optimizer of ours. `safe_get_full_fp32_param` shows them, as a copy; of a
  frozen weight it gives None, as DeepSpeed does.
- **Unknown keys are errors** that name the nearest one. Where DeepSpeed ignores such a key and nothing else would be
  trained, they are warnings.
- **Files that DeepSpeed reads are read**, Hjson and base64 among them. We compare both on the keys of 80 public files
  and programs. Refused are only those that ask for other numbers: the keys at the end of this page, and the optimizers
  Lamb, MuAdam, MuSGD and the 1-bit ones. A run starts with the first rate of its schedule:
  `last_batch_iteration` may only be -1.
- **Scripts.** Transcripts of DeepSpeedExamples' cifar10, gan and HelloDeepSpeed were run with changed imports, on data
  of ours and on a CPU. They are without comments and docstrings, two messages for the log are shorter, and gan has
  one of its five data sets and no lines that ask for a GPU. In fp32, cifar10 prints the losses and predictions of
  DeepSpeed 0.19.8, and gan in 125 iterations every number of plain PyTorch. Of bing_bert and of Megatron-DeepSpeed
  (without pipeline) the functions that train, log, save and load were run on small models of ours: in fp32 with the
  losses of plain PyTorch, in fp32, bf16 and fp16 with the same losses after a restart. The suite has small scripts
  with the same calls (`tests/deepspeed/test_scripts.py`). cifar10's file of today has keys in `bf16` that DeepSpeed
  0.19.8 refuses, and so do we.
- **Megatron's `mpu`** is accepted where it says that no layer is cut between ranks.
- **`"auto"` is for a trainer.** Where nothing has filled it in, one warning lists every `"auto"` and what it became.
  A schedule whose length is `"auto"` is an error, unless the program passes its own schedule.
- **transformers' Trainer, Lightning and others** have their own page: docs/trainers.md.
- **`step()` without a backward** is an error before anything changes, where one rank trains. DeepSpeed fails there with
  an error of an index; with the optimizer on the CPU it makes a step of zero gradients.
- **The model's names** have no `module.` in front: `engine.state_dict()` and `engine.named_parameters()` are those of
  the model.
- **A checkpoint in the middle of an update** lacks the gradients so far, as in DeepSpeed, and a warning says so. With
  `step_overlap` `"in_backward"` or `"speculative"` it is an error.
- **Checkpoints** have another format (docs/checkpoints.md). `python -m deepoffload.checkpoint` converts those of
  DeepSpeed, and writes universal ones that DeepSpeed loads. With a stage of ZeRO, `zero_to_fp32.py` and
  `zero_to_torch.py` stand next to them, with DeepSpeed's arguments. They replace no files that are there.
- **The engine is no `torch.nn.Module`.** What is not its own is looked up on the model, so `engine.generate(...)`
  works.
- **A process alone needs no launcher**: `init_distributed()` and `initialize()` make a group of one rank, without a
  port.
"""

_TREATMENTS = {
    Treatment.HONOURED: "means the same",
    Treatment.MAPPED: "becomes a key or behaviour of ours",
    Treatment.INAPPLICABLE: "accepted, sets nothing",
    Treatment.ERROR: "refused: ignoring it would change numbers",
}


def markdown() -> str:
    """The whole page."""
    parts = [_HEAD, "\n## Names of the package\n"]
    parts += _sections("deepspeed", PACKAGE_NAMES)
    parts.append("\n## Names of the engine\n")
    parts += _sections("engine", ENGINE_NAMES)
    parts.append("\n## Keys of the configuration\n\nWhat each key does, and its values: docs/config.md.\n")
    keys = (*DEEPSPEED_KEYS, *DEEPSPEED_TOOL_KEYS)
    for treatment, title in _TREATMENTS.items():
        names = ", ".join(f"`{key.path}`" for key in keys if key.treatment is treatment)
        parts.append(f"\n**{title[0].upper()}{title[1:]}**: {names}.\n")
    return "".join(parts)


def _sections(prefix: str, table: Mapping[str, PeerName]) -> Iterable[str]:
    """A list of what does the same, and a table of the rest."""
    same = [name for name, known in table.items() if known.presence is Presence.HERE]
    yield f"\n**As in DeepSpeed**: {', '.join(f'`{name}`' for name in same)}.\n"
    for presence, title, column in (
        (Presence.OTHERWISE, "Here, with another meaning", "What it does here"),
        (Presence.ABSENT, "Not here", "Why, or what to use"),
    ):
        by_text: dict[str, list[str]] = {}
        for name, known in table.items():
            if known.presence is presence:
                by_text.setdefault(known.text, []).append(f"`{name}`")
        rows = "".join(f"| {', '.join(names)} | {text} |\n" for text, names in by_text.items())
        yield f"\n### {title}: {prefix}\n\n| Name | {column} |\n| --- | --- |\n{rows}"


if __name__ == "__main__":
    sys.stdout.write(markdown())
