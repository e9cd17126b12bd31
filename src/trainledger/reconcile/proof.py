"""All ranks of a run together: every rank's lines, and what only several ranks can say.

Where the router decides how much a rank sends, no rank's bytes are predicted exactly; but what the ranks of a group
pass in together is what they get together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainledger.account.rank import Prediction
from trainledger.reconcile.reconcile import Key, moved_id, observed_calls, reconcile, unexplained
from trainledger.reconcile.verdict import Proof, Unexplained, Verdict, judged
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
    held = not any(line.verdict in ("differs", "missing") for line in lines)
    proven = held and not whole.items
    return Proof(lines=tuple(lines), unexplained=whole, verdict="proven" if proven else "differs")


def _conserved(pairs: Sequence[Pair]) -> Iterator[Verdict]:
    """Of each group whose bytes are routed: what its ranks pass in is what they get. The line is its first rank's.

    Nothing is said of a group of which some rank was not run.
    """
    seen = {observation.rank: observed_calls(observation) for _, observation in pairs}
    groups: dict[tuple[Key, tuple[int, ...]], None] = {}
    for prediction, _ in pairs:
        for sent in prediction.calls:
            if sent.routed:
                groups[(sent.op, sent.group, sent.dtype), sent.peers] = None
    for key, peers in (one for one in groups if seen.keys() >= set(one[1])):
        found = [calls[key] for calls in (seen[rank] for rank in peers) if key in calls]
        given, got = sum(one.in_bytes for one in found), sum(one.out_bytes for one in found)
        yield Verdict(
            id=moved_id(key, "conserved"),
            rank=peers[0],
            predicted=given,
            measured=got,
            unit="B",
            basis="exact",
            verdict=judged(given, got, "exact") if len(found) == len(peers) else "missing",
        )
