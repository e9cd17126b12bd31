"""What one rank saw of a run, as plain data: written by observers, read by reconcile. No torch here."""

from __future__ import annotations

import msgspec

from trainledger.lines import Instant, Line


class Unclaimed(msgspec.Struct, frozen=True, kw_only=True):
    """A live storage that no named tensor uses: its size, and the operation and phase it was born in."""

    bytes: int
    dtype: str
    shape: tuple[int, ...]
    op: str
    phase: str


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """All live storages of one instant.

    claimed   held lines by id: `held/<category>/<parameter name>[:what]`, local bytes of this rank; what a storage
              holds beyond its named tensors is `held/padding/<category>`
    """

    instant: Instant
    claimed: dict[str, int]
    unclaimed: tuple[Unclaimed, ...]
    total_bytes: int


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """Collectives of one kind, group and dtype in one optimizer step, all together.

    op      a word of account/traffic/collectives.py: all_reduce, all_gather, reduce_scatter, all_to_all, send, recv,
            broadcast ...
    group   the ledger's name of the group: dp, dp_shard, dp_replicate, tp, cp, pp, ep, expert_dp,
            expert_dp_shard, embedding, world
    """

    op: str
    group: str
    dtype: str
    ranks: int
    count: int
    in_bytes: int
    out_bytes: int


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """A group that was called in the observed step.

    name     the ledger's, as of Call
    ranks    those that its backend sends to
    seen     collectives that were seen
    issued   collectives that its backend numbered meanwhile, whoever issued them; None where it numbers none
    """

    name: str
    ranks: tuple[int, ...]
    seen: int
    issued: int | None


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's observed step.

    flop          FLOP by operation: matmul, grouped_matmul, attention_forward, attention_backward
    phases_s      wall time: forward, backward (of a pipeline: pipeline), clip, optimizer, and step, which has them all
    reported      lines that have no exact prediction: saved activations and the peak
    losses        mean loss of every step on the ranks that compute it
    gathered      parameters of each unit as gathered, largest at once: `held/gathered/<unit>` to bytes
    groups        those of all calls
    saved         what a checkpoint of the whole job has in its files, by line; of one rank, where one was saved
    """

    rank: int
    digest: str
    held: tuple[Held, ...]
    calls: tuple[Call, ...]
    flop: dict[str, int]
    phases_s: dict[str, float]
    losses: tuple[float, ...]
    gathered: dict[str, int] = {}
    groups: tuple[Group, ...] = ()
    reported: tuple[Line, ...] = ()
    saved: dict[str, int] = {}
    torch_version: str = ""
