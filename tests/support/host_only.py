"""Which tests of the suite say nothing on a device with separate memory, and why."""

from __future__ import annotations

NUMPY = "numpy and DLPack have no access to the device's memory"
PLUGIN = "the mode by which the plugin makes tensors on the device is one thread's, and in Dynamo's way"
HOST = "it is about tensors on the CPU"
NOTHING_RESTS = "nothing is kept for good on a device"
BUDGET = "it is about the host's budget, and the weights are shown from the device's"

HOST_ONLY = {
    "tests/accumulation/test_exactness.py::*Mixtral*": "the simulated GPU has no histogram of integers",
    "tests/accumulation/test_lives.py::test_a_thread_that_accumulates_holds_back_no_interrupts*": PLUGIN,
    "tests/accumulation/test_one_thread.py::test_the_logits_are_those_of_one_micro_batch_at_a_time": PLUGIN,
    "tests/checkpoint/test_save_modules.py::test_every_tensor_of_the_state_dict_is_stored*": HOST,
    "tests/checkpoint/test_save_modules.py::test_inside_inference_mode_and_with_a_default_device": HOST,
    "tests/checkpoint/test_save_modules.py::test_other_types*": HOST,
    "tests/checkpoint/test_save_modules.py::test_the_weights_of_the_moment_are_saved": HOST,
    "tests/models/test_zoo.py::*Mixtral*": "the simulated GPU has no histogram of integers",
    "tests/models/test_zoo.py::*Trainer*": "the test tells the Trainer to use the CPU",
    "tests/params/test_aliases.py::test_alias_kept_over_evictions_keeps_its_values[*numpy]": NUMPY,
    "tests/params/test_aliases.py::test_alias_kept_over_evictions_keeps_its_values[*dlpack]": NUMPY,
    "tests/params/test_aliases.py::test_dlpack_of_a_frozen_weight_kept_over_evictions*": NUMPY,
    "tests/params/test_aliases.py::test_writes_through_an_alias_reach_the_weight*": NUMPY,
    "tests/params/test_aliases.py::test_torch_save_writes_the_weights*": HOST,
    "tests/params/test_aliases.py::test_held_aliases_of_everything_end_in_a_clear_error": BUDGET,
    "tests/params/test_aliases.py::test_unseen_edit_that_brings_old_values_back": HOST,
    "tests/params/test_adoption.py::test_built_on_meta_and_materialised*": HOST,
    "tests/params/test_compiled_layers.py::*": PLUGIN,
    "tests/params/test_conversions.py::test_the_same_type_is_accepted": HOST,
    "tests/params/test_edits_in_forward.py::test_edits_by_a_module[*Numpy]": NUMPY,
    "tests/params/test_gradients.py::test_gradients_edited_before_the_step_are_what_is_clipped": NUMPY,
    "tests/params/test_modes_and_strangers.py::test_writes_to_a_stand_in_are_refused[numpy*": NUMPY,
    "tests/params/test_modes_and_strangers.py::test_distributed_data_parallel_is_refused": "no process group knows it",
    "tests/params/test_optimizers.py::test_torch_optimizers[*lamb-like]": "torch takes foreach for plain tensors there",
    "tests/params/test_resident.py::test_a_closed_engine_refuses_its_open_graphs": NOTHING_RESTS,
    "tests/params/test_resident.py::test_no_hooks_where_nothing_moves": NOTHING_RESTS,
    "tests/params/test_small_gradients.py::test_only_small_ones_stay_with_autograd": NOTHING_RESTS,
    "tests/params/test_small_gradients.py::test_their_memory_is_bounded": NOTHING_RESTS,
    "tests/params/test_state_dict.py::test_safetensors": HOST,
    "tests/params/test_state_dict.py::test_torch_save": HOST,
    "tests/params/test_state_dict.py::test_addresses_are_those_of_copies_that_follow": HOST,
    "tests/params/test_state_dict.py::test_values_are_the_weights*": NUMPY,
    "tests/params/test_windows.py::test_late_parameter_that_finds_no_room_can_be_tried_again": BUDGET,
    "tests/params/test_windows.py::test_two_threads_*": PLUGIN,
}
"""Patterns of node ids. ``tests/support/on_simulated_gpu.py`` skips these with the reason."""
