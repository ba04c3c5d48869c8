"""Ranks decide on a step together: all make the same one, or all raise."""

from __future__ import annotations

from tests.ranks import deciding
from tests.support.rank_processes import values_of, values_of_each


def test_an_overflow_on_one_rank_counts_for_all():
    assert values_of(deciding.decide, 3, 0.1, 0.1, 0.1) == [(True, 7)] * 3


def test_ranks_with_other_settings_are_refused():
    errors = values_of(deciding.error_of, 2, deciding.decide, 0.1, 0.2)
    assert any(error.startswith("UsageError: the ranks' optimizer.step() differ") for error in errors), errors
    assert all("the ranks' optimizer.step() differ" in error for error in errors), errors
    assert all("is updated with other numbers on rank 1 than on rank 0" in error for error in errors), errors


def test_ranks_that_clip_otherwise_are_told_so():
    errors = values_of(deciding.error_of, 2, deciding.clip_otherwise)
    assert all("differ: max_grad_norm is 1.0 on rank 1, and None on rank 0" in error for error in errors), errors


def test_ranks_that_do_not_agree_on_who_has_a_gradient_are_refused():
    errors = values_of(deciding.error_of, 3, deciding.lack_a_gradient)
    assert all("differ: blocks.1.scale is updated on ranks 0 and 2 alone" in error for error in errors), errors


def test_an_error_inside_the_step_is_raised_on_all_ranks():
    errors = values_of(deciding.error_of, 3, deciding.fail_inside, 1)
    assert errors[1] == "ValueError: lr must not be negative, got -1"
    for error in (errors[0], errors[2]):
        assert error.startswith("RankError: ") and "ValueError: lr must not be negative" in error, error


def test_what_cannot_be_added_up_is_refused_and_the_rest_goes_on():
    for assigned, graph in values_of(deciding.refuse, 2):
        assert "blocks.0.scale.grad is a tensor that the program has assigned" in assigned
        assert "blocks.0.scale.grad has a graph" in graph


def test_gradients_that_are_dropped_on_their_way_are_dropped_on_all_ranks():
    values_of(deciding.drop_while_under_way, 2)


def test_a_rank_may_leave_its_backward_out_and_wait_for_the_others():
    """Nobody adds anything up before all are at the step. There are more units than slots."""
    for found in values_of_each(deciding.leave_a_backward_out, 2, [("group",), ("memory",)]):
        assert all(min(rounds) > 0 for rounds, _ in found)
        (_, others), (_, of_the_idle) = found
        assert not others
        (said,) = of_the_idle
        assert said.startswith("rank 1: optimizer.step() without a backward since the step before")
