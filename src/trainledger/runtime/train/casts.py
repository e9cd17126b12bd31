"""What casts to FP8 lose in a run, judged by the limits of its spec: said, answered by bf16, or the end."""

from __future__ import annotations

from typing import NamedTuple

from trainledger.errors import BadInput
from trainledger.runtime.precision.casts import CastCounts, casts_of, fall_back
from trainledger.runtime.precision.share import Share
from trainledger.runtime.program import Program
from trainledger.runtime.spec import FP8_RECIPES
from trainledger.runtime.train.agree import total
from trainledger.runtime.train.metrics import Lost
from trainledger.runtime.train.result import Layer
from trainledger.runtime.train.spec import Fp8Spec


class Found(NamedTuple):
    """What a step has shown.

    lost      where casts were counted
    said      of layers that are beyond the limits
    trouble   why the run must end, or ""
    """

    lost: Lost | None = None
    said: tuple[str, ...] = ()
    trouble: str = ""


class Casts:
    """The FP8 side of a run: how many products there are, and what casts lose every so many steps.

    lost    of the last step that was counted, layer by layer
    ran     products in FP8 that ran on all ranks in the first step; None before it
    """

    def __init__(self, spec: Fp8Spec, program: Program) -> None:
        self._spec = spec
        self._program = program
        self._fp8 = program.spec.precision in FP8_RECIPES
        self._counts = False
        self.lost: tuple[Layer, ...] = ()
        self.ran: int | None = None
        if self._fp8 and not self.share().fp8_gemms:
            raise BadInput(self._none("of the plan is in FP8"))

    def begin(self, step: int, *, quiet: bool) -> None:
        """Before a step: count its casts if it is time to, unless the step is to be `quiet`."""
        due = self._spec.every > 0 and step % self._spec.every == 0
        self._counts = self._fp8 and due and not quiet
        self._program.precision.count(on=self._counts)

    def end(self) -> Found:
        """After a step, on all ranks. BadInput where an FP8 recipe ran no product in FP8."""
        if not self._fp8:
            return Found()
        if self.ran is None:
            self.ran = self._count_ran()
            if not self.ran:
                raise BadInput(self._none("ran in FP8 in the first step"))
        # on every rank alike, so that no other step pays for the collective
        counts = casts_of(self._program) if self._counts else []
        self._program.precision.count(on=False)
        if not counts:
            return Found()
        self.lost = tuple(
            Layer(layer=one.layer, operand=one.operand, saturated=one.saturated_share, flushed=one.flushed_share)
            for one in counts
        )
        beyond = [one for one in self.lost if self._is_beyond(one)]
        said = tuple(self._answered(one) for one in beyond)
        trouble = f"{said[0]}; use --fp8-action bf16, raise the limits, or use --precision bf16" if said else ""
        return Found(_together(counts), said, trouble if self._spec.action == "stop" else "")

    def share(self) -> Share:
        """What of a step's arithmetic is in FP8 now."""
        return self._program.precision.share()

    @property
    def fallen(self) -> tuple[str, ...]:
        """Layers that compute in 16 bits now."""
        fp8 = self._program.precision.fp8
        return () if fp8 is None else tuple(fp8.fallen)

    def _is_beyond(self, one: Layer) -> bool:
        return one.saturated > self._spec.saturated_limit or one.flushed > self._spec.flushed_limit

    def _answered(self, one: Layer) -> str:
        """Let a layer fall back where the spec says so; what is to be said of it."""
        limits = self._spec
        text = (
            f"{one.layer}: casts of its {one.operand} to FP8 saturated {one.saturated:.3%} and flushed "
            f"{one.flushed:.3%}, and at most {limits.saturated_limit:.3%} and {limits.flushed_limit:.3%} may be"
        )
        if limits.action != "bf16" or one.layer in self.fallen:
            return text
        fall_back(self._program, one.layer)
        return f"{text}; it computes in bf16 from now on"

    def _count_ran(self) -> int:
        fp8 = self._program.precision.fp8
        own = sum(tally.gemms for tally in fp8.tallies.values()) if fp8 is not None else 0
        return total(own)

    def _none(self, what: str) -> str:
        return (
            f"--precision {self._program.spec.precision} and no product {what}: this would be a run in bf16 under "
            "another name; use --precision bf16"
        )


def _together(counts: list[CastCounts]) -> Lost:
    """All operands as one, and the worst of them."""
    elements = sum(one.elements for one in counts)
    worst = max(counts, key=lambda one: one.saturated_share + one.flushed_share)
    return Lost(
        saturated=sum(one.saturated for one in counts) / elements,
        flushed=sum(one.flushed for one in counts) / elements,
        worst=f"{worst.layer}:{worst.operand}",
        worst_saturated=worst.saturated_share,
        worst_flushed=worst.flushed_share,
    )
