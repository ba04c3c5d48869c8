"""Where each known trap of paging parameters has its test.

Every line names a trap and the tests of this folder that hold it; the test below sees to it that they exist.

Silently wrong without care:
- somebody else's saved-tensor hooks are on the stack: test_activation_checkpoint_of_modules, test_selective_checkpoint,
  test_save_on_cpu_around_the_forward, test_hooks_of_the_program_see_activations_and_all_is_unpacked
- an alias is kept over an eviction: test_alias_kept_over_evictions_keeps_its_values, test_aliases_as_buffer_and_cache,
  test_views_kept_across_modules, test_capsule_kept_over_evictions, test_torch_save
- forward runs again without hooks: test_module_called_inside_a_custom_backward, test_nested_and_sequential_checkpoints
- backward by weights, or from weights: test_whatever_runs_inside, test_inner_steps_with_other_weights,
  test_products_and_matrices_of_derivatives
- weights are used outside of any module: test_activation_checkpoint_of_a_function_that_uses_weights,
  test_weights_in_the_loss
- clipping, scalers and optimizers of torch: test_clip_grad_norm, test_clip_grad_value_and_get_total_norm,
  test_grad_scaler, test_torch_optimizers, test_lbfgs_and_two_step_optimizers
- gradients set to None or deleted: test_zero_grad, test_delete_and_set_to_none, test_freeze_train_unfreeze
- gradients of the program's own: test_flat_gradient_buffer, test_gradient_object_kept_over_a_second_backward,
  test_gradient_shared_by_two_parameters
- wrappers that average gradients: test_distributed_data_parallel_is_refused
- writes that move no version: test_writes_through_an_alias_reach_the_weight, test_edits_by_a_module,
  test_edits_by_hooks, test_unseen_edit_that_brings_old_values_back
- a weight changed between forward and backward:
  test_weight_changed_between_forward_and_backward_is_refused_as_torch_does,
  test_own_edits_in_a_forward_that_runs_again
- an activation changed between forward and backward: test_operations_and_edits, test_random_programs
- one parameter in several places: test_tied_twice_used_unused_scalar_and_empty_parameters, test_tied_after_paging,
  test_same_objects_and_marks
- several parameters in one storage: test_several_parameters_in_one_storage, test_data_set_to_a_view_of_itself
- a write to a stand-in: test_neither_writes_to_a_stand_in_nor_reads_of_it
- torch.func: test_functional_call, test_vmap_over_inputs, test_gradients_by_torch_func, test_of_raw_parameters
- saved-tensor hooks disabled: test_hooks_disabled_around_the_forward
- foreign tensor classes: test_activations_of_a_foreign_class
- user modes: test_dispatch_modes_do_not_see_transfers, test_default_device_meta,
  test_inference_mode_and_training_after_it
- memory formats: test_channels_last_weights_get_channels_last_gradients
- frozen when adopted: test_parameter_frozen_when_adopted_and_unfrozen_later_is_trained
- hooks put on before the type changes: test_hooks_put_on_before_the_type_changes_still_fire
- traced and scripted: test_jit_is_refused
- several weights saved by one node: test_two_weights_saved_by_one_node
- questions about a tensor: test_metadata_brings_no_bytes

Right, but over the budget without care:
- autocast: test_no_second_copy_of_the_model, test_training, test_tied_weights
- a state dict: test_values_hold_no_memory, test_random_views, test_more_weights_than_open_files, test_safetensors,
  test_loaded_into_itself_by_assignment
- foreach and fused calls: test_torch_optimizers, test_parameters_to_vector
- autograd.grad: test_autograd_grad_and_partial_backward, test_nothing_is_pinned_and_no_gradient_lands
- aliases in cycles and tracebacks: test_aliases_in_reference_cycles_are_collected,
  test_held_aliases_of_everything_end_in_a_clear_error
- graphs that are dropped: test_graph_that_is_dropped_leaves_nothing_behind

Loud without care:
- parameters made of parameters: test_new_parameters_from_paged_ones, test_parametrizations
- lazy, meta and late parameters: test_lazy_modules, test_parameters_on_meta_are_refused_at_exit,
  test_built_on_meta_and_materialised, test_late_arrivals, test_load_state_dict_by_assignment,
  test_late_parameter_that_finds_no_room_can_be_tried_again
- complex weights: test_complex_weights, test_complex_views_of_a_weight
- gradients with a graph: test_gradients_with_a_graph_in_a_loss, test_double_backward
- conversions: test_other_types_are_refused_and_nothing_changes
- copies: test_deepcopy_is_a_plain_model, test_pickled_model_is_a_plain_model
- calls that fail: test_exception_in_a_window, test_failing_inner_call_leaves_the_outer_window_open
- threads: test_two_threads_use_one_model
- compiled layers: test_compiled_layers, test_fullgraph_of_a_whole_model_is_refused
"""

from __future__ import annotations

import re
from pathlib import Path


def test_every_trap_has_its_tests() -> None:
    named = set(re.findall(r"\btest_\w+", __doc__ or ""))
    sources = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    missing = {name for name in named if f"def {name}(" not in sources}
    assert len(named) > 50 and not missing, sorted(missing)
