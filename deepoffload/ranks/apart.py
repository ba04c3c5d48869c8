"""What is said where ranks are at different places that can never meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deepoffload.ranks.rounds import Want, WantKind


class PeersApartError(RuntimeError):
    """Ranks wait for each other in vain. ``wants`` and ``steps`` say where every rank is, in rank order."""

    def __init__(self, wants: Sequence[Want], steps: Sequence[int]) -> None:
        super().__init__(tuple(wants))
        self.wants, self.steps = tuple(wants), tuple(steps)

    def text(self, words: Callable[[Want], str]) -> str:
        """What all ranks raise; ``words`` of a want are for people."""
        closed = [rank for rank, want in enumerate(self.wants) if want.kind is WantKind.CLOSE]
        places = [
            f"rank {rank} was at {words(want)} (step {self.steps[rank]})"
            for rank, want in enumerate(self.wants)
            if rank not in closed
        ]
        if closed:
            ended = ", ".join(f"rank {rank} has closed its engine after {self.steps[rank]} steps" for rank in closed)
            return (
                f"{ended}, but others train on: {', '.join(places)}. All ranks make the same number of steps (where "
                "they have different numbers of batches: with deepoffload.join(model)): close the engine when every "
                "rank has made its last one"
            )
        return (
            f"ranks write to different weights or gradients, or not all of them do: {', '.join(places)}. All ranks "
            "make the same changes in the same places of the program, and none inside deepoffload.join; clip with the "
            "optimizer's max_grad_norm there, not with torch's clip_grad_norm_"
        )
