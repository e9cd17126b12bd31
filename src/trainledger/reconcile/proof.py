"""All ranks of a run together: every rank's lines, and what only several ranks can say.

Where the router decides how much a rank sends or computes, no rank's figure is predicted exactly. But every token
visits as many experts, wherever they are: what the ranks of a group pass in, get and compute together is known exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainledger.account.rank import Prediction
from trainledger.account.rank_memory import SAVED, SAVED_TOLERANCE
from trainledger.lines import Basis, done_id
from trainledger.reconcile.reconcile import Key, moved_id, observed_calls, predicted_calls, reconcile, unexplained
from trainledger.reconcile.verdict import WRONG, Proof, Unexplained, Unit, Verdict, Word, judged
from trainledger.runtime.observe.observation import Observation

Pair = tuple[Prediction, Observation]


def proof(pairs: Sequence[Pair]) -> Proof:
    """Whether what every rank did is what was predicted of it. A dry run has some of the ranks, one of each kind."""
    if not pairs:
        raise AssertionError("a proof is of at least one rank")
    lines = [verdict for pair in pairs for verdict in reconcile(*pair)]
    lines.extend(_conserved(pairs))
    left = [unexplained(*pair) for pair in pairs]
    whole = Unexplained(
        bytes=sum(part.bytes for part in left),
        calls=sum(part.calls for part in left),
        items=tuple(item for part in left for item in part.items),
    )
    held = not any(line.verdict in WRONG for line in lines)
    proven = held and not whole.items
    return Proof(lines=tuple(lines), unexplained=whole, verdict="proven" if proven else "differs")


def _conserved(pairs: Sequence[Pair]) -> Iterator[Verdict]:
    """Lines of each group whose tokens are routed, over all its ranks, under the number of the first.

    Nothing is said of a group of which some rank was not run.
    """
    seen = {observation.rank: (prediction, observation) for prediction, observation in pairs}
    groups: dict[tuple[int, ...], dict[Key, None]] = {}
    for prediction, _ in pairs:
        for sent in prediction.calls:
            if sent.routed and seen.keys() >= set(sent.peers):
                groups.setdefault(sent.peers, {})[sent.op, sent.group, sent.dtype] = None
    for peers, keys in groups.items():
        group = [seen[rank] for rank in peers]
        yield from (_exchanged(key, group) for key in keys)
        yield from _computed(group, next(iter(keys)))
        yield from _kept(group, next(iter(keys)))


def _exchanged(key: Key, group: Sequence[Pair]) -> Verdict:
    """What the ranks pass in together: as predicted, and what they get together."""
    predicted = sum(predicted_calls(prediction)[key].in_bytes for prediction, _ in group)
    calls = [found for _, observation in group if (found := observed_calls(observation).get(key)) is not None]
    given, got = sum(one.in_bytes for one in calls), sum(one.out_bytes for one in calls)
    measured = got if given == predicted else given
    word = judged(predicted, measured if len(calls) == len(group) else None, "exact")
    return _line(moved_id(key, "conserved"), group, predicted, measured, "B", word)


def _computed(group: Sequence[Pair], key: Key) -> Iterator[Verdict]:
    """The arithmetic of each operation whose rows the exchange of this key divides, over all ranks."""
    for name in (name for name, amount in group[0][0].flop.items() if amount.basis != "exact"):
        predicted = sum(prediction.flop[name].amount for prediction, _ in group)
        measured = sum(observation.flop.get(name.removeprefix(done_id("")), 0) for _, observation in group)
        word = judged(predicted, measured, "exact")
        yield _line(f"{name}:conserved@{key[1]}", group, predicted, measured, "FLOP", word)


def _kept(group: Sequence[Pair], key: Key) -> Iterator[Verdict]:
    """Activations that all ranks save together: every row that is exchanged here costs as much, whoever has it."""
    amounts = [prediction.alive.get(SAVED) for prediction, _ in group]
    measured = [line.amount for _, seen in group for line in seen.reported if line.id == SAVED]
    if all(amounts) and len(measured) == len(group):
        predicted, total = sum(amount.amount for amount in amounts if amount), int(sum(measured))
        word = judged(predicted, total, "modelled", SAVED_TOLERANCE)
        yield _line(f"{SAVED}:conserved@{key[1]}", group, predicted, total, "B", word, "modelled")


def _line(
    identity: str,
    group: Sequence[Pair],
    predicted: int,
    measured: int,
    unit: Unit,
    word: Word,
    basis: Basis = "exact",
) -> Verdict:
    rank = group[0][1].rank
    return Verdict(id=identity, rank=rank, predicted=predicted, measured=measured, unit=unit, basis=basis, verdict=word)
