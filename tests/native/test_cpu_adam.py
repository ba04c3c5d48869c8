"""adam_step against float64 and torch.optim: every layout, dtype, length, misalignment and special value."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deepoffload.native import cpu_adam
from deepoffload.native.cpu_adam import AdamHyper, DType, Segment, StateLayout
from tests.native.cpu_adam_scenario import FORMS, HYPER, AdamBuffers, bf16_bits, canonical, decode, guards_intact
from tests.native.every_split import kept

EPSILON = 2.0**-24  # half an ulp, relative
TINY = 2.0**-149
HYPERS = {
    "adamw": HYPER,
    "adam_l2": HYPER._replace(decoupled=False),
    "plain": HYPER._replace(weight_decay=0.0, step=1),
    "late": HYPER._replace(step=100_000, lr=3e-5),
    "no_bias_correction": HYPER._replace(bias_correction=False),
    "maximize": HYPER._replace(maximize=True),
    "amsgrad": HYPER._replace(amsgrad=True),
    "low_beta1": HYPER._replace(beta1=0.3),
    "zero_betas": HYPER._replace(beta1=0.0, beta2=0.0),
}


def reference(buffers: AdamBuffers, hyper: AdamHyper, grad_factor: float) -> dict[str, np.ndarray]:
    """One step in float64 from the exact inputs, and the magnitudes that the rounding errors scale with."""
    p, g = buffers.value().astype(np.float64), decode(buffers.grad).astype(np.float64) * grad_factor
    m, v = buffers.exp_avg.astype(np.float64), buffers.exp_avg_sq.astype(np.float64)
    g = -g if hyper.maximize else g
    unit_g = np.abs(g)
    if not hyper.decoupled:
        unit_g = unit_g + np.abs(hyper.weight_decay * p)
        g = g + hyper.weight_decay * p
    correction1 = 1 - hyper.beta1**hyper.step if hyper.bias_correction else 1.0
    correction2 = 1 - hyper.beta2**hyper.step if hyper.bias_correction else 1.0
    unit_m = np.abs(m) + unit_g
    m = m + (1 - hyper.beta1) * (g - m)
    v = hyper.beta2 * v + (1 - hyper.beta2) * g * g
    second = np.maximum(buffers.max_exp_avg_sq.astype(np.float64), v) if hyper.amsgrad else v
    step_size, denom = hyper.lr / correction1, np.sqrt(second / correction2) + hyper.eps
    decayed = p * (1 - hyper.lr * hyper.weight_decay) if hyper.decoupled else p
    return {
        "p": decayed - step_size * m / denom,
        "m": m,
        "v": v,
        "s": second,
        "unit_v": (1 - hyper.beta2) * np.abs(g) * unit_g,
        "unit_m": unit_m,
        "unit_p": np.maximum(np.abs(p), np.abs(decayed)),
        "unit_update": step_size * unit_m / denom,
    }


def assert_within_bounds(buffers: AdamBuffers, expected: dict[str, np.ndarray], hyper: AdamHyper) -> None:
    m, v, p = (x.astype(np.float64) for x in (buffers.exp_avg, buffers.exp_avg_sq, buffers.value()))
    assert (np.abs(m - expected["m"]) <= 6 * EPSILON * expected["unit_m"] + TINY).all()
    bound_v = 8 * EPSILON * (expected["v"] + expected["unit_v"]) + 4 * TINY
    assert (np.abs(v - expected["v"]) <= bound_v).all()
    # Where v is subnormal its few bits, not the arithmetic, decide the update.
    normal = expected["v"] > 2.0**-120
    of_update = 16 * EPSILON + bound_v / np.maximum(expected["s"], TINY)
    bound = 3 * EPSILON * expected["unit_p"] + of_update * expected["unit_update"] + TINY
    assert (np.abs(p - expected["p"]) <= bound)[normal].all()
    if hyper.amsgrad:
        s = buffers.max_exp_avg_sq.astype(np.float64)
        assert (np.abs(s - expected["s"]) <= bound_v + EPSILON * expected["s"]).all()


@pytest.mark.parametrize("hyper", HYPERS.values(), ids=HYPERS.keys())
@pytest.mark.parametrize("grad", DType)
@pytest.mark.parametrize(("layout", "copy"), FORMS)
def test_against_float64(layout: StateLayout, copy: DType, grad: DType, hyper: AdamHyper) -> None:
    buffers = AdamBuffers(20_011, layout, grad, copy, seed=1)
    expected = reference(buffers, hyper, 0.37)
    buffers.step(hyper, grad_factor=0.37, num_threads=2)
    assert_within_bounds(buffers, expected, hyper)


@pytest.mark.parametrize(("layout", "copy"), FORMS)
@pytest.mark.parametrize("grad", DType)
def test_every_length_and_misalignment_equals_a_long_run(layout: StateLayout, copy: DType, grad: DType) -> None:
    """Lengths 1 to 70 cut from one long run at odd addresses: same bits, and no byte outside the segment is touched."""
    for n in range(1, 71):
        for offset_bytes in (0, 1, 6):
            long = AdamBuffers(128, layout, grad, copy, seed=n, special=True)
            short = AdamBuffers(n, layout, grad, copy, seed=n, offset_bytes=offset_bytes)
            for whole, part in zip([long.grad, *long.outputs()], [short.grad, *short.outputs()], strict=True):
                part[:] = whole[:n]
            hyper = HYPER._replace(amsgrad=n % 2 == 0)
            long.step(hyper)
            short.step(hyper)
            for whole, part in zip(long.outputs(), short.outputs(), strict=True):
                assert canonical(part) == canonical(whole[:n])
                assert guards_intact(part)


@pytest.mark.parametrize("name", ["adamw", "adam_l2", "amsgrad", "maximize", "low_beta1"])
def test_against_torch_over_many_steps(name: str) -> None:
    """fp32, 50 steps against the default implementation: the errors of single steps do not add up to more."""
    hyper = HYPERS[name]
    torch.manual_seed(0)
    n, steps = 10_007, 50
    param = torch.nn.Parameter(torch.randn(n))
    ours, m, v, s = param.detach().clone(), torch.zeros(n), torch.zeros(n), torch.zeros(n)
    kind = torch.optim.AdamW if hyper.decoupled else torch.optim.Adam
    optimizer = kind(
        [param],
        lr=hyper.lr,
        betas=(hyper.beta1, hyper.beta2),
        eps=hyper.eps,
        weight_decay=hyper.weight_decay,
        amsgrad=hyper.amsgrad,
        maximize=hyper.maximize,
        foreach=False,
        fused=False,
    )
    for step in range(1, steps + 1):
        grad = torch.randn(n)
        param.grad = grad.clone()
        optimizer.step()
        segment = Segment(
            n,
            0,
            grad.data_ptr(),
            DType.FP32,
            ours.data_ptr(),
            DType.FP32,
            exp_avg=m.data_ptr(),
            exp_avg_sq=v.data_ptr(),
            max_exp_avg_sq=s.data_ptr(),
        )
        cpu_adam.adam_step([segment], [hyper._replace(step=step)], StateLayout.FP32, grad_factor=1.0, num_threads=2)
    update_max = hyper.lr * steps
    difference = (ours.double() - param.detach().double()).abs()
    assert (difference <= 2 * steps * EPSILON * param.detach().double().abs().clamp_min(update_max)).all()
    state = optimizer.state[param]
    assert torch.allclose(m, state["exp_avg"], rtol=1e-5, atol=1e-6)
    assert torch.allclose(v, state["exp_avg_sq"], rtol=2e-6, atol=0)


def ulp(x: torch.Tensor) -> torch.Tensor:
    """The spacing of fp32 numbers at ``x``, in float64."""
    return torch.exp2(torch.floor(torch.log2(x.double().abs().clamp_min(2.0**-126))) - 23)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", ["adamw", "adam_l2", "amsgrad", "maximize", "low_beta1", "zero_betas"])
def test_ulps_against_torch_for_one_step_from_equal_state(name: str, fused: bool) -> None:
    """The numbers stated in the docstring of adam_step."""
    hyper = HYPERS[name]
    torch.manual_seed(1)
    n = 200_003
    param = torch.nn.Parameter(torch.randn(n) * 10 ** (torch.rand(n) * 6 - 5))
    param.grad = torch.randn(n) * 10 ** (torch.rand(n) * 6 - 5)
    m, v, s = torch.randn(n).mul_(0.1), torch.rand(n), torch.rand(n)
    before = param.detach().clone()
    ours, our_m, our_v, our_s = before.clone(), m.clone(), v.clone(), s.clone()
    kind = torch.optim.AdamW if hyper.decoupled else torch.optim.Adam
    optimizer = kind(
        [param],
        lr=hyper.lr,
        betas=(hyper.beta1, hyper.beta2),
        weight_decay=hyper.weight_decay,
        amsgrad=hyper.amsgrad,
        maximize=hyper.maximize,
        fused=fused,
        foreach=False,
    )
    state = {"step": torch.tensor(2.0), "exp_avg": m, "exp_avg_sq": v, "max_exp_avg_sq": s}
    optimizer.state[param] = state
    optimizer.step()
    segment = Segment(
        n,
        0,
        param.grad.data_ptr(),
        DType.FP32,
        ours.data_ptr(),
        DType.FP32,
        exp_avg=our_m.data_ptr(),
        exp_avg_sq=our_v.data_ptr(),
        max_exp_avg_sq=our_s.data_ptr(),
    )
    cpu_adam.adam_step([segment], [hyper], StateLayout.FP32, grad_factor=1.0, num_threads=2)
    theirs = param.detach()
    assert ((our_m.double() - m.double()).abs() <= ulp(torch.maximum(m.abs(), param.grad.abs()))).all()
    assert ((our_v.double() - v.double()).abs() <= ulp(v)).all()
    change = ours.double() - before.double()
    bound = ulp(torch.maximum(before.abs(), ours.abs())) + 4 * ulp(change)
    assert ((ours.double() - theirs.double()).abs() <= bound).all()
    if fused and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        assert (ours != theirs).float().mean() <= 1e-3


@pytest.mark.parametrize("copy", [DType.BF16, DType.FP16])
def test_master_layout_writes_the_rounded_copy_and_the_same_master(copy: DType) -> None:
    with_copy = AdamBuffers(5_003, StateLayout.MASTER, DType.BF16, copy, seed=4, special=True)
    plain = AdamBuffers(5_003, StateLayout.FP32, DType.BF16, DType.FP32, seed=4, special=True)
    for buffers in (with_copy, plain):
        buffers.step(grad_factor=0.5, num_threads=2)
    assert canonical(with_copy.master) == canonical(plain.master)
    dtype = torch.bfloat16 if copy is DType.BF16 else torch.float16
    expected = torch.from_numpy(np.array(plain.master)).to(dtype)
    got = torch.from_numpy(np.array(with_copy.weight).view(np.int16)).view(dtype)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got[~got.isnan()], expected[~expected.isnan()])


@pytest.mark.parametrize("offset_bytes", [0, 2])
@pytest.mark.parametrize("copy", [DType.BF16, DType.FP16])
def test_large_copies_go_past_the_caches_with_the_same_bits(copy: DType, offset_bytes: int) -> None:
    """4 MiB and more are written with other instructions, where the addresses are aligned."""
    n = (1 << 21) + 37
    large = AdamBuffers(n, StateLayout.MASTER, DType.BF16, copy, seed=4, offset_bytes=offset_bytes, special=True)
    plain = AdamBuffers(n, StateLayout.FP32, DType.BF16, DType.FP32, seed=4, special=True)
    for buffers in (large, plain):
        buffers.step(grad_factor=0.5, num_threads=2)
    assert canonical(large.master) == canonical(plain.master)
    dtype = torch.bfloat16 if copy is DType.BF16 else torch.float16
    expected = torch.from_numpy(np.array(plain.master)).to(dtype)
    got = torch.from_numpy(np.array(large.weight).view(np.int16)).view(dtype)
    assert torch.equal(got[~expected.isnan()], expected[~expected.isnan()])
    assert torch.equal(got.isnan(), expected.isnan()) and guards_intact(large.weight)


def test_master_without_a_copy_is_the_fp32_step() -> None:
    master = AdamBuffers(777, StateLayout.MASTER, DType.FP16, DType.BF16, seed=3)
    plain = AdamBuffers(777, StateLayout.FP32, DType.FP16, DType.FP32, seed=3)
    cpu_adam.adam_step(
        [master.segment()._replace(weight=0)], [HYPER], StateLayout.MASTER, grad_factor=1.0, num_threads=1
    )
    plain.step()
    assert master.master.tobytes() == plain.master.tobytes()
    assert not master.weight.any()


def test_split_layout_is_the_fp32_step_in_other_bytes() -> None:
    """Rounded as torch rounds, and but for the ties that a split moves by one ulp."""
    split = AdamBuffers(9_001, StateLayout.SPLIT_BF16, DType.BF16, DType.BF16, seed=6)
    plain = AdamBuffers(9_001, StateLayout.FP32, DType.BF16, DType.FP32, seed=6)
    plain.master[:] = split.value()
    for step in range(1, 4):
        for buffers in (split, plain):
            buffers.step(HYPER._replace(step=step), num_threads=2)
        assert (split.weight == bf16_bits(plain.master)).all()
        plain.master[:] = kept(plain.master)
        assert split.value().tobytes() == plain.master.tobytes()


def test_special_values_follow_torch() -> None:
    buffers = AdamBuffers(4_096, StateLayout.FP32, DType.FP32, DType.FP32, seed=8, special=True)
    param = torch.nn.Parameter(torch.from_numpy(np.array(buffers.master)))
    param.grad = torch.from_numpy(np.array(buffers.grad))
    optimizer = torch.optim.AdamW([param], lr=1e-3, weight_decay=0.01, foreach=False)
    optimizer.state[param] = {
        "step": torch.tensor(2.0),
        "exp_avg": torch.from_numpy(np.array(buffers.exp_avg)),
        "exp_avg_sq": torch.from_numpy(np.array(buffers.exp_avg_sq)),
    }
    optimizer.step()
    buffers.step()
    for ours, theirs in (
        (buffers.master, param.detach().numpy()),
        (buffers.exp_avg, optimizer.state[param]["exp_avg"].numpy()),
        (buffers.exp_avg_sq, optimizer.state[param]["exp_avg_sq"].numpy()),
    ):
        # A product near the largest number may overflow on one side only, by its last bit.
        edge = np.abs(np.nan_to_num(theirs, posinf=0, neginf=0)) > 1e38
        assert np.array_equal(np.isnan(ours)[~edge], np.isnan(theirs)[~edge])
        assert np.array_equal(np.isinf(ours)[~edge], np.isinf(theirs)[~edge])


def test_subnormal_moments_are_kept_under_set_flush_denormal() -> None:
    buffers = AdamBuffers(100, StateLayout.FP32, DType.FP32, DType.FP32)
    buffers.grad[:] = 0
    buffers.exp_avg[:] = 1e-39
    expected = np.float32(1e-39) * np.float32(0.9)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        buffers.step()
    finally:
        torch.set_flush_denormal(False)
    assert np.allclose(buffers.exp_avg.astype(np.float64), float(expected), rtol=1e-6)
    assert buffers.exp_avg.all()


@pytest.mark.parametrize("num_threads", [1, 2, 3, 7, 64])
def test_many_segments_and_groups_on_any_number_of_threads(num_threads: int) -> None:
    sizes = [1, 63, 64, 4_097, 70_001, 5, 300_000]
    hypers = [HYPER._replace(lr=1e-2 * (i + 1), amsgrad=i % 2 == 1) for i in range(3)]
    together = [AdamBuffers(n, StateLayout.SPLIT_BF16, DType.BF16, DType.BF16, seed=n) for n in sizes]
    alone = [AdamBuffers(n, StateLayout.SPLIT_BF16, DType.BF16, DType.BF16, seed=n) for n in sizes]
    segments = [buffers.segment(i % 3) for i, buffers in enumerate(together)]
    cpu_adam.adam_step(segments, hypers, StateLayout.SPLIT_BF16, grad_factor=0.5, num_threads=num_threads)
    for i, buffers in enumerate(alone):
        buffers.step(hypers[i % 3], grad_factor=0.5)
    for a, b in zip(together, alone, strict=True):
        assert all(x.tobytes() == y.tobytes() for x, y in zip(a.outputs(), b.outputs(), strict=True))


def test_nothing_to_do_is_fine() -> None:
    cpu_adam.adam_step([], [], StateLayout.FP32, grad_factor=1.0, num_threads=1)
