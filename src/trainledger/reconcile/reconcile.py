"""One rank's prediction and what was observed of it, joined by line id.

Held lines join on their id at each instant; collectives on kind, group and dtype, with three lines each: how many
calls, bytes passed in, bytes written; FLOP on the operation. A group has the ranks that the plan gives it, and its
backend has numbered as many collectives as were seen. After the loss saved activations are alive under no name: their
bytes and the peak are modelled, each with a tolerance, and only what is alive at the other instants under no name is
unexplained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from trainledger.account.rank import Prediction, Sent
from trainledger.lines import Basis, done_id, line_id
from trainledger.reconcile.verdict import Item, Unexplained, Unit, Verdict, Word, judged
from trainledger.runtime.observe.observation import Call, Held, Observation, Unclaimed

Key = tuple[str, str, str]
"""(op, group, dtype)."""

SAVES = "loss"
"""The instant at which activations are alive."""


class Moved(NamedTuple):
    """Collectives of one key together; `routed` are the sides whose bytes the router decides."""

    calls: int
    in_bytes: int
    out_bytes: int
    routed: frozenset[str]


def reconcile(prediction: Prediction, observation: Observation) -> list[Verdict]:
    """A verdict on every predicted line of one rank, and the lines that are only reported."""
    if prediction.rank != observation.rank:
        raise AssertionError(f"rank {prediction.rank} is predicted and rank {observation.rank} observed")
    return [
        *_held(prediction, observation),
        *_moved(prediction, observation),
        *_done(prediction, observation),
        *_gathered(prediction, observation),
        *_alive(prediction, observation),
        *_saved(prediction, observation),
    ]


def _held(prediction: Prediction, observation: Observation) -> Iterator[Verdict]:
    seen = {held.instant: held.claimed for held in observation.held}
    for instant, lines in prediction.held.items():
        for identity, amount in lines.items():
            measured = seen.get(instant, {}).get(identity)
            word = judged(amount.amount, measured, amount.basis)
            yield Verdict(
                id=identity,
                rank=prediction.rank,
                predicted=amount.amount,
                measured=measured,
                unit="B",
                basis=amount.basis,
                verdict=word,
                instant=instant,
            )


def predicted_calls(prediction: Prediction) -> dict[Key, Moved]:
    """What should be sent, by key."""
    found: dict[Key, Moved] = {}
    for sent in prediction.calls:
        key = sent.op, sent.group, sent.dtype
        before = found.get(key, Moved(0, 0, 0, frozenset()))
        found[key] = Moved(
            before.calls + sent.count,
            before.in_bytes + sent.in_bytes,
            before.out_bytes + sent.out_bytes,
            before.routed | _routed(sent),
        )
    return found


def _routed(sent: Sent) -> frozenset[str]:
    return frozenset({sent.routed} if sent.routed else ())


def observed_calls(observation: Observation) -> dict[Key, Moved]:
    """What was sent, by key; a group of one rank sends nothing."""
    found: dict[Key, Moved] = {}
    for call in observation.calls:
        if call.ranks > 1:
            key = call.op, call.group, call.dtype
            before = found.get(key, Moved(0, 0, 0, frozenset()))
            found[key] = Moved(
                before.calls + call.count,
                before.in_bytes + call.in_bytes,
                before.out_bytes + call.out_bytes,
                frozenset(),
            )
    return found


def moved_id(key: Key, what: str) -> str:
    """The id of a line of collectives.

    >>> moved_id(("all_gather", "dp_shard", "bf16"), "calls")
    'moved/all_gather/bf16:calls@dp_shard'
    """
    op, group, dtype = key
    return line_id("moved", op, f"{dtype}:{what}", group)


def _moved(prediction: Prediction, observation: Observation) -> Iterator[Verdict]:
    seen = observed_calls(observation)
    for key, moved in predicted_calls(prediction).items():
        found = seen.get(key)
        sides: tuple[tuple[str, Unit, int, int | None], ...] = (
            ("calls", "calls", moved.calls, found and found.calls),
            ("in", "B", moved.in_bytes, found and found.in_bytes),
            ("out", "B", moved.out_bytes, found and found.out_bytes),
        )
        for what, unit, predicted, measured in sides:
            if predicted or measured:
                basis: Basis = "modelled" if what in moved.routed else "exact"
                yield _line(moved_id(key, what), prediction.rank, predicted, measured, unit, basis)


def _done(prediction: Prediction, observation: Observation) -> Iterator[Verdict]:
    """FLOP of an operation that nothing predicts differ from none."""
    seen = {done_id(operation): amount for operation, amount in observation.flop.items()}
    for identity in sorted(prediction.flop.keys() | seen.keys()):
        amount = prediction.flop.get(identity)
        predicted, basis = (0, "exact") if amount is None else (amount.amount, amount.basis)
        yield _line(identity, prediction.rank, predicted, seen.get(identity), "FLOP", basis)


def _gathered(prediction: Prediction, observation: Observation) -> Iterator[Verdict]:
    for identity in sorted(prediction.gathered.keys() | observation.gathered.keys()):
        predicted = prediction.gathered.get(identity, 0)
        yield _line(identity, prediction.rank, predicted, observation.gathered.get(identity), "B", "exact")


def _alive(prediction: Prediction, observation: Observation) -> Iterator[Verdict]:
    """Saved activations and the peak: off by no more than their tolerance, where anything is predicted of them."""
    seen = {line.id: line for line in observation.reported}
    for identity in sorted(prediction.alive.keys() | seen.keys()):
        amount, line = prediction.alive.get(identity), seen.get(identity)
        measured = None if line is None else int(line.amount)
        basis: Basis = "modelled" if amount is not None else "exact"
        predicted, tolerance = (None, None) if amount is None else (amount.amount, amount.tolerance)
        word: Word = "reported" if predicted is None else judged(predicted, measured, basis, tolerance)
        yield Verdict(
            id=identity,
            rank=prediction.rank,
            predicted=predicted,
            measured=measured,
            unit="FLOP" if line is not None and line.unit == "FLOP" else "B",
            basis=basis,
            verdict=word,
        )


def _saved(prediction: Prediction, observation: Observation) -> Iterator[Verdict]:
    """Checkpoints, of which the first rank speaks for all."""
    for identity in sorted(prediction.saved.keys() | observation.saved.keys()):
        amount, measured = prediction.saved.get(identity), observation.saved.get(identity)
        yield _line(identity, prediction.rank, amount.amount if amount is not None else 0, measured, "B", "exact")


def _line(identity: str, rank: int, predicted: int, measured: int | None, unit: Unit, basis: Basis) -> Verdict:
    word: Word = judged(predicted, measured, basis)
    return Verdict(id=identity, rank=rank, predicted=predicted, measured=measured, unit=unit, basis=basis, verdict=word)


def unexplained(prediction: Prediction, observation: Observation) -> Unexplained:
    """What one rank was seen to hold or send that no line claims."""
    storages = list(_storages(observation))
    lines = list(_lines(prediction, observation))
    calls = [*_calls(prediction, observation), *_strange_groups(prediction, observation)]
    return Unexplained(
        bytes=sum(item.bytes for item in (*storages, *lines)),
        calls=sum(item.times for item in calls),
        items=(*storages, *lines, *calls),
    )


def _storages(observation: Observation) -> Iterator[Item]:
    """Storages under no name at the instants when no activation is alive, those of one kind together, largest first."""
    counted: dict[Unclaimed, dict[str, int]] = {}
    for held in observation.held:
        if held.instant != SAVES:
            for storage, times in Counter(held.unclaimed).items():
                counted.setdefault(storage, {})[held.instant] = times
    for storage, instants in sorted(counted.items(), key=lambda pair: -pair[0].bytes):
        times = max(instants.values())
        yield Item(
            rank=observation.rank,
            what="storage",
            op=storage.op,
            phase=storage.phase,
            dtype=storage.dtype,
            shape=storage.shape,
            times=times,
            bytes=times * storage.bytes,
            instants=tuple(instants),
        )


def _lines(prediction: Prediction, observation: Observation) -> Iterator[Item]:
    """Lines that a run names and nothing predicts, each at its largest."""
    extra: dict[str, dict[str, int]] = {}
    for held in observation.held:
        for identity, amount in held.claimed.items():
            if identity not in prediction.held.get(held.instant, {}) and _expected(prediction, held):
                extra.setdefault(identity, {})[held.instant] = amount
    for identity, instants in extra.items():
        yield Item(
            rank=observation.rank,
            what="line",
            op=identity,
            phase="",
            dtype="",
            shape=(),
            times=1,
            bytes=max(instants.values()),
            instants=tuple(instants),
        )


def _expected(prediction: Prediction, held: Held) -> bool:
    """Whether anything is predicted of this instant."""
    return held.instant in prediction.held


def _calls(prediction: Prediction, observation: Observation) -> Iterator[Item]:
    """Collectives of a kind, group and dtype that nothing predicts."""
    expected = predicted_calls(prediction)
    for call in observation.calls:
        if call.ranks > 1 and (call.op, call.group, call.dtype) not in expected:
            yield _item(observation.rank, call)


def _item(rank: int, call: Call) -> Item:
    said = f"{call.op}/{call.dtype}@{call.group}"
    return _calls_item(rank, said, call.count, call.dtype, call.in_bytes + call.out_bytes)


def _strange_groups(prediction: Prediction, observation: Observation) -> Iterator[Item]:
    """Groups of other ranks than those that the plan gives them, and collectives that the observer did not see."""
    peers = {sent.group: sent.peers for sent in prediction.calls}
    for group in observation.groups:
        if group.seen and len(group.ranks) > 1 and group.ranks != peers.get(group.name, group.ranks):
            yield _calls_item(observation.rank, f"@{group.name} of ranks {_listed(group.ranks)}", group.seen)
        if group.issued is not None and group.issued != group.seen:
            yield _calls_item(observation.rank, f"unseen@{group.name}", abs(group.issued - group.seen))


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _calls_item(rank: int, op: str, times: int, dtype: str = "", size: int = 0) -> Item:
    return Item(rank=rank, what="calls", op=op, phase="", dtype=dtype, shape=(), times=times, bytes=size)
