"""A run whose layers keep tensors on the host: copied there as the next one runs, and back before its backward."""

from __future__ import annotations

from trainledger.account.memory.reserved.run import COMPUTE, Ran, Run


def kept_by(ran: Ran) -> list[tuple[int, int]]:
    """(id, bytes) of the storages that a part of the model keeps until its backward, its input among them."""
    script = ran.layer.script
    alive: dict[int, int] = {}
    for op, index, nbytes in script.forward.requests:
        if op == "alloc":
            alive[index] = nbytes
        else:
            alive.pop(index, None)
    if not script.keeps_output:
        alive.pop(script.output, None)
    kept = [(ran.base + index, nbytes) for index, nbytes in alive.items()]
    if ran.owned and ran.given >= 0 and script.forward.input_free < 0:
        kept.append((ran.given, script.input_bytes))
    return kept


class OffloadRun(Run):
    """What two layers keep is on the card at most."""

    def has_run(self, ran: list[Ran]) -> None:
        """What the layer before keeps is on the host by now."""
        layers = [part for part in ran if part.layer.script.input >= 0 and part.layer.script.output >= 0]
        if ran[-1] in layers and layers[1:]:
            self.requests.free(name for name, _ in kept_by(layers[-2]))

    def runs_backward(self, ran: list[Ran], index: int) -> None:
        """What the layer before keeps is copied back meanwhile."""
        before = ran[index - 1] if index > 1 else None
        if before is None or ran[index].layer.script.output < 0 or before.layer.script.input < 0:
            return
        for name, nbytes in kept_by(before):
            self.requests.events.append(("alloc", name, nbytes, COMPUTE))
