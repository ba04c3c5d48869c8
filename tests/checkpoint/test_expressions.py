"""Following what is done to stand-ins: the pieces are the values that the real operations give."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepoffload.checkpoint.expressions import Expressions
from deepoffload.checkpoint.safetensors_file import write_file
from deepoffload.checkpoint.weights import _entry
from deepoffload.errors import UnsupportedError


class Opened:
    """Counts how many sources are open at a time."""

    def __init__(self) -> None:
        self.now = 0
        self.most = 0

    @contextlib.contextmanager
    def open(self, real: Tensor) -> Iterator[Tensor]:
        self.now += 1
        self.most = max(self.most, self.now)
        yield real
        self.now -= 1

    def stand_in(self, expressions: Expressions, real: Tensor) -> Tensor:
        return expressions.source(real.shape, real.stride(), real.dtype, lambda: self.open(real))


def joined(expressions: Expressions, tensor: Tensor, window_bytes: int) -> Tensor:
    pieces = [piece.clone() for piece in expressions.pieces(tensor, window_bytes)]
    assert all(piece.numel() * piece.element_size() <= max(window_bytes, piece.element_size()) for piece in pieces)
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=tensor.dtype)


def operations(draw: Any, tensor: Tensor) -> Any:
    """One operation that fits the tensor, as a function that also fits its stand-in."""
    dim = draw(st.integers(0, tensor.dim() - 1))
    other = draw(st.integers(0, tensor.dim() - 1))
    size = tensor.shape[dim]
    part = draw(st.integers(0, size - 1))
    choices = [
        lambda t: t.transpose(dim, other),
        lambda t: t.transpose(dim, other).contiguous(),
        lambda t: t.narrow(dim, part, size - part),
        lambda t: torch.chunk(t, 2, dim)[0].contiguous(),
        lambda t: torch.chunk(t, size, dim)[part].squeeze(dim) if t.dim() > 1 else t,
        lambda t: torch.cat([t, t.flip(dim)], dim),
        lambda t: torch.stack([t, t.clone()], dim),
        lambda t: t.reshape(-1),
        lambda t: t.transpose(dim, other).reshape(t.shape[0], -1),
        lambda t: t.unsqueeze(dim),
    ]
    return draw(st.sampled_from(choices))


@settings(max_examples=300)
@given(st.data())
def test_pieces_are_the_values_of_any_chain_of_operations(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    real = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    if data.draw(st.booleans()):
        real = real.transpose(0, -1)
    opened, expressions = Opened(), Expressions()
    stand_in = opened.stand_in(expressions, real)
    for _ in range(data.draw(st.integers(0, 5))):
        operation = operations(data.draw, real)
        real = operation(real)
        with expressions:
            stand_in = operation(stand_in)
        assert stand_in.shape == real.shape
    window_bytes = 4 * data.draw(st.integers(1, 40))
    assert torch.equal(joined(expressions, stand_in, window_bytes), real.reshape(-1))
    assert opened.now == 0


def test_an_unpacked_expert_is_read_where_it_lies() -> None:
    """Mixtral's way: packed experts, halves of them, one expert at a time. No piece is a copy."""
    real = torch.arange(3 * 8 * 5, dtype=torch.float32).reshape(3, 8, 5)
    opened, expressions = Opened(), Expressions()
    stand_in = opened.stand_in(expressions, real)
    with expressions:
        halves = [half.contiguous() for half in torch.chunk(stand_in, 2, dim=1)]
        experts = [torch.chunk(half, 3, dim=0)[1].squeeze(0) for half in halves]
    low, high = real.data_ptr(), real.data_ptr() + real.numel() * 4
    for half, expert in enumerate(experts):
        pieces = list(expressions.pieces(expert, 32))
        assert torch.equal(torch.cat(pieces).view(4, 5), real[1, 4 * half : 4 * half + 4])
        assert all(low <= piece.data_ptr() < high for piece in pieces)


def test_joined_tensors_are_read_one_after_the_other() -> None:
    reals = [torch.randn(n, 3) for n in (2, 4, 1)]
    opened, expressions = Opened(), Expressions()
    stand_ins = [opened.stand_in(expressions, real) for real in reals]
    with expressions:
        fused = torch.cat(stand_ins, dim=0)
    assert torch.equal(joined(expressions, fused, 16).view(7, 3), torch.cat(reals))
    assert opened.most == 1


def test_large_strided_tensors_are_copied_in_windows() -> None:
    real = torch.randn(300, 700).t()
    opened, expressions = Opened(), Expressions()
    pieces = [len(piece) for piece in expressions.pieces(opened.stand_in(expressions, real), 4096)]
    assert max(pieces) <= 1024
    assert sum(pieces) == 210_000


def test_changing_a_weight_in_place_is_refused() -> None:
    expressions = Expressions()
    stand_in = Opened().stand_in(expressions, torch.ones(3))
    with expressions, pytest.raises(UnsupportedError, match="in place"):
        stand_in.mul_(2)


def test_a_source_is_let_go_before_the_next_one_is_opened(tmp_path: Path) -> None:
    """A view that is still held would keep a weight in memory while the next one needs room."""
    memory: list[weakref.ref[torch.UntypedStorage]] = []

    @contextlib.contextmanager
    def open_next() -> Iterator[Tensor]:
        assert all(before() is None for before in memory)
        shown = torch.ones(6)
        memory.append(weakref.ref(shown.untyped_storage()))
        yield shown

    expressions = Expressions()
    sources = [expressions.source(torch.Size([6]), (1,), torch.float32, open_next) for _ in range(4)]
    with expressions:
        tensors = {"joined": torch.cat(sources[:2]), "third": sources[2], "last": sources[3]}
    entries = [_entry(expressions, name, tensor) for name, tensor in tensors.items()]
    write_file(str(tmp_path / "file"), entries, {}, lambda nbytes: None)
    assert len(memory) == 4
