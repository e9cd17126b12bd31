"""The recipe of a run: what it casts to, what it scales, and the state of both that a checkpoint must keep."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from trainledger.runtime.model import Decoder
from trainledger.runtime.precision.fp8 import Fp8
from trainledger.runtime.precision.scaling import make_scaler
from trainledger.runtime.precision.share import Share, share_of
from trainledger.runtime.spec import FP8_RECIPES, RunSpec
from trainledger.runtime.tensors import Kept, Named
from trainledger.runtime.world import World


class Recipe:
    """What `precision` asks of a program, in the order of a step.

    fp8      the FP8 layers of this rank; None under a recipe without
    scaler   of the loss; None but under fp16
    """

    def __init__(self, spec: RunSpec, world: World) -> None:
        self._spec = spec
        self.fp8 = Fp8(spec, world.device) if spec.precision in FP8_RECIPES else None
        group = world.group("world")
        self.scaler = make_scaler(spec.scaling, group, world.device) if spec.precision == "fp16" else None

    def convert(self, decoder: Decoder) -> None:
        """Change the layers of a decoder, before it is cut or wrapped."""
        if self.fp8 is not None:
            self.fp8.convert(decoder)

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to run backward from."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    @property
    def scale(self) -> float | None:
        """What the loss is multiplied by; None where it is not."""
        return None if self.scaler is None else self.scaler.scale_now

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide all gradients by the scale, before they are clipped, and learn whether all of the job are finite."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, parameters: Iterable[Kept]) -> bool:
        """Step, or skip on every rank of the job; whether it was skipped."""
        if self.scaler is not None:
            return self.scaler.advance(optimizer, parameters)
        optimizer.step()
        return False

    def weights_changed(self) -> None:
        """To be called on all ranks once weights have been written and lie sharded: by a step, or from a checkpoint."""
        if self.fp8 is not None:
            self.fp8.weights_changed()

    def count(self, *, on: bool) -> None:
        """Whether casts to FP8 are counted from now on, which `casts_of` tells; it costs a pass over each operand."""
        if self.fp8 is not None:
            self.fp8.count(on=on)

    def share(self) -> Share:
        """What of a step's arithmetic is in FP8 now."""
        return share_of(self._spec, () if self.fp8 is None else self.fp8.fallen)

    def named(self, parameters: Iterable[Kept]) -> Iterator[Named]:
        """What a recipe keeps beside the states."""
        if self.scaler is not None:
            yield from (Named("buffers", "loss scale", tensor) for tensor in self.scaler.kept())
        if self.fp8 is not None:
            yield from (Named("buffers", "scales of weights", scale) for scale in self.fp8.scales(parameters))

    def fall_back(self, layer: str, parameters: Iterable[Kept]) -> None:
        """Let an FP8 layer compute in 16 bits from now on."""
        if self.fp8 is not None:
            self.fp8.fall_back(layer, parameters)

    def state_dict(self) -> dict[str, Any]:
        """The scaler's state and the layers that have fallen back: plain values, the same on every rank."""
        found: dict[str, Any] = {}
        if self.scaler is not None:
            found["scaler"] = self.scaler.state_dict()
        if self.fp8 is not None:
            found["fallen"] = list(self.fp8.fallen)
        return found

    def load_state_dict(self, state: dict[str, Any], parameters: Iterable[Kept]) -> None:
        """Take up such a state; what another recipe left there is not read."""
        if self.scaler is not None and "scaler" in state:
            self.scaler.load_state_dict(state["scaler"])
        for layer in state.get("fallen", ()):
            self.fall_back(layer, list(parameters))
