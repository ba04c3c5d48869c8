"""Wrong arguments raise ValueError with the name of the field, before anything is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deepoffload.native import cpu_adam
from deepoffload.native.cpu_adam import DType, StateLayout
from tests.native.cpu_adam_scenario import HYPER, AdamBuffers


@pytest.mark.parametrize(
    ("layout", "field", "value"),
    [
        *(
            (layout, field, value)
            for layout in StateLayout
            for field, value in [
                ("numel", 0),
                ("numel", -1),
                ("numel", 1 << 60),
                ("numel", 1.5),
                ("hyper_index", 1),
                ("hyper_index", -1),
                ("grad", 0),
                ("grad", -8),
                ("grad", None),
                ("grad", 1 << 64),
                ("grad_dtype", 3),
                ("exp_avg", 0),
                ("exp_avg_sq", 0),
                ("max_exp_avg_sq", 0),
            ]
        ),
        (StateLayout.FP32, "weight", 0),
        (StateLayout.FP32, "weight_dtype", DType.BF16),
        (StateLayout.SPLIT_BF16, "weight", 0),
        (StateLayout.SPLIT_BF16, "remainder", 0),
        (StateLayout.SPLIT_BF16, "weight_dtype", DType.FP16),
        (StateLayout.SPLIT_BF16, "weight_dtype", DType.FP32),
        (StateLayout.MASTER, "master", 0),
        (StateLayout.MASTER, "weight_dtype", DType.FP32),
        (StateLayout.MASTER, "weight_dtype", 9),
    ],
)
def test_segment_fields(layout: StateLayout, field: str, value: Any) -> None:
    copy = DType.FP32 if layout is StateLayout.FP32 else DType.BF16
    good, bad = (AdamBuffers(100, layout, DType.FP32, copy, seed=i) for i in range(2))
    before = [array.tobytes() for array in good.outputs() + bad.outputs()]
    segments = [good.segment(), bad.segment()._replace(**{field: value})]
    with pytest.raises(ValueError, match=rf"segments\[1\]\.{field}\b"):
        cpu_adam.adam_step(segments, [HYPER._replace(amsgrad=True)], layout, grad_factor=1.0, num_threads=1)
    assert before == [array.tobytes() for array in good.outputs() + bad.outputs()]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lr", -1.0),
        ("lr", float("nan")),
        ("lr", float("inf")),
        ("lr", "fast"),
        ("beta1", 1.0),
        ("beta1", -0.1),
        ("beta2", 1.0),
        ("beta2", float("nan")),
        ("eps", -1e-8),
        ("weight_decay", -0.1),
        ("weight_decay", None),
        ("step", 0),
        ("step", -3),
    ],
)
def test_hyper_fields(field: str, value: Any) -> None:
    buffers = AdamBuffers(10, StateLayout.FP32, DType.FP32, DType.FP32)
    before = buffers.master.tobytes()
    with pytest.raises(ValueError, match=rf"hypers\[0\]\.{field}\b"):
        buffers.step(HYPER._replace(**{field: value}))
    assert buffers.master.tobytes() == before


def test_other_arguments_of_a_step() -> None:
    buffers = AdamBuffers(10, StateLayout.FP32, DType.FP32, DType.FP32)
    before = buffers.master.tobytes()
    for factor in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="grad_factor"):
            buffers.step(grad_factor=factor)
    for threads in (0, -1, 1 << 40):
        with pytest.raises(ValueError, match="num_threads"):
            buffers.step(num_threads=threads)
    with pytest.raises(ValueError, match="layout"):
        cpu_adam.adam_step([buffers.segment()], [HYPER], 7, grad_factor=1.0, num_threads=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"segments\[0\] is not a Segment"):
        cpu_adam.adam_step([(1, 2)], [HYPER], StateLayout.FP32, grad_factor=1.0, num_threads=1)  # type: ignore[list-item]
    at, aside = buffers.master.ctypes.data, buffers.remainder.ctypes.data
    for elsewhere, message in (
        ((at, 40, at + 8), r"elsewhere\[0\]: what is old and what is new overlap"),
        ((at + 4, 36, aside), r"segments\[0\] lies partly in one of elsewhere"),
        ((at, 40, 0), r"elsewhere\[0\]\.old is 0"),
        ((at, 40), r"elsewhere\[0\] is not \(begin, nbytes, old\)"),
    ):
        with pytest.raises(ValueError, match=message):
            segments, common = [buffers.segment()], {"grad_factor": 1.0, "num_threads": 1}
            cpu_adam.adam_step(segments, [HYPER], StateLayout.FP32, **common, elsewhere=[elsewhere])  # type: ignore
    assert buffers.master.tobytes() == before


def test_arguments_of_the_passes() -> None:
    array = np.zeros(16, np.float32)
    good = {
        "dst": array.ctypes.data,
        "src": array.ctypes.data,
        "numel": 4,
        "dst_dtype": DType.FP32,
        "src_dtype": DType.FP32,
        "accumulate": True,
        "num_threads": 1,
    }
    for field, value in [
        ("dst", 0),
        ("src", 0),
        ("src", -1),
        ("numel", 0),
        ("numel", -1),
        ("dst_dtype", 3),
        ("src_dtype", 4),
        ("num_threads", 0),
    ]:
        with pytest.raises(ValueError, match=rf"\b{field}\b"):
            cpu_adam.land(**{**good, field: value})
    a = array.ctypes.data
    for call, field in [
        (lambda: cpu_adam.sum_of_squares(0, 4, dtype=DType.FP32, num_threads=1), "src"),
        (lambda: cpu_adam.sum_of_squares(a, 0, dtype=DType.FP32, num_threads=1), "numel"),
        (lambda: cpu_adam.split_fp32(a, 0, a, 4, num_threads=1), "hi"),
        (lambda: cpu_adam.split_fp32(a, a, 0, 4, num_threads=1), "lo"),
        (lambda: cpu_adam.merge_fp32(a, a, 0, 4, num_threads=1), "dst"),
        (lambda: cpu_adam.fill(a, 4, 256, 1), "byte"),
        (lambda: cpu_adam.fill(a, -4, 0, 1), "nbytes"),
        (lambda: cpu_adam.copy(a, 0, 4, 1), "src"),
    ]:
        with pytest.raises(ValueError, match=rf"\b{field}"):
            call()
    assert not array.any()
