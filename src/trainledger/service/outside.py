"""What is to be said of what a run holds outside of its steady step: what card or node cannot hold."""

from __future__ import annotations

from collections.abc import Sequence

from trainledger.account.memory.outside import Outside
from trainledger.service.common import Note, Run
from trainledger.units import format_bytes


def outside_notes(run: Run, lines: Sequence[Outside], rest_bytes: int) -> tuple[Note, ...]:
    """One note for each line that is more than there is; what is offloaded has a note of its own.

    rest_bytes   states on the device between steps, on top of which a run saves
    """
    cluster = run.setting.cluster
    node = cluster.host_bytes if cluster is not None else None
    found: list[Note] = []
    for line in lines:
        if line.when not in ("load", "save") or line.place == "disk":
            continue
        beside = rest_bytes if line.when == "save" and line.place == "device" else 0
        have = run.usable_bytes if line.place == "device" else node
        if have is None or line.amount + beside <= have:
            continue
        states = f" beside {format_bytes(beside)} of states" if beside else ""
        where = "the card" if line.place == "device" else "the node"
        verb = "loading" if line.when == "load" else "saving"
        text = (
            f"{verb}: {line.what}: takes {format_bytes(line.amount)}{states}, and {where} has {format_bytes(have)}; "
            "choose another way, where the engine has one"
        )
        found.append(Note(rule="outside-step", severity="advise", message=text))
    return tuple(found)
