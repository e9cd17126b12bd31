"""The most that a whole training step holds, by PyTorch's meters, beside what the ledger expects of the same plan.

A CPU has no allocator that counts: there the observer of a proof is the meter, and nothing is reserved.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from cards.here import accelerator_here, forget, synchronize
from cards.record import Row
from cards.sizes import Sizes
from trainledger.errors import BadInput
from trainledger.lines import line_id
from trainledger.runtime.observe.observer import Observer
from trainledger.runtime.program import Program
from trainledger.runtime.spec import RunSpec
from trainledger.runtime.world import World
from trainledger.service.ledger import account
from trainledger.service.prove_plan import planned
from trainledger.service.prove_request import Request
from trainledger.units import format_bytes

STEPS = 3
"""Optimizers make their state in the first; the last is the one that is looked at."""
LEFT_BYTES = 256 << 20
"""What may be allocated before: workspaces of cuBLAS stay for as long as the process."""
PEAK = line_id("held", "peak", "allocated")


class Plan(NamedTuple):
    """What differs between the plans that are measured."""

    precision: str
    recompute: str

    def request(self, sizes: Sizes, card: str | None) -> Request:
        """The plan of one rank."""
        return sizes.trained.request(precision=self.precision, recompute=self.recompute, gpu=card)


PLANS = (Plan("bf16", "none"), Plan("bf16", "full"), Plan("fp8-tensorwise", "none"))


def rows_of(plan: Plan, device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """Peaks of one plan in bytes; needs a process group of one rank."""
    card = accelerator_here(device)
    request = plan.request(sizes, None if card is None else card.name)
    spec = planned(request).spec
    meters = account(request).memory.meters
    measure = _on_card if device.type == "cuda" else _watched
    for meter, amount in measure(spec, device).items():
        name = f"peak/{sizes.trained.model}/{plan.precision}/recompute {plan.recompute}/{meter}"
        yield Row(id=name, amount=amount, unit="B", predicted=float(meters[meter].estimate))


def _on_card(spec: RunSpec, device: torch.device) -> dict[str, int]:
    """What PyTorch's allocator says of the last step; what it has reserved, of the run so far."""
    forget(device)
    left = torch.cuda.memory_allocated(device)
    if left > LEFT_BYTES:
        raise BadInput(f"{format_bytes(left)} of what was measured before are still allocated; measure peaks alone")
    program = Program(spec, World(spec, device))
    reserved = 0
    for index in range(STEPS):
        reserved = max(reserved, torch.cuda.max_memory_reserved(device))
        torch.cuda.reset_peak_memory_stats(device)
        program.step(index)
        synchronize(device)
    reserved = max(reserved, torch.cuda.max_memory_reserved(device))
    return {"allocated": torch.cuda.max_memory_allocated(device), "reserved": reserved}


def _watched(spec: RunSpec, device: torch.device) -> dict[str, int]:
    """The most that was alive between two operations of the last step."""
    world = World(spec, device)
    observer = Observer(world.names)
    with observer.watching():
        program = Program(spec, world, observer)
        for index in range(STEPS - 1):
            program.step(index)
        with observer.observing():
            program.step(STEPS - 1)
    seen = observer.result(0, spec.digest, ()).reported
    return {"allocated": next(int(line.amount) for line in seen if line.id == PEAK)}
