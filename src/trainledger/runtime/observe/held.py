"""All live storages of one instant, each claimed by the tensors that the plan names, or by none."""

from __future__ import annotations

import gc
import time
from collections.abc import Container, Iterable

import torch

from trainledger.lines import Instant, line_id
from trainledger.runtime.observe.observation import Held, Unclaimed
from trainledger.runtime.observe.storages import Storage, StorageTracker
from trainledger.runtime.observe.tensors import dtype_word, local_part, tensor_bytes

PATIENCE_S: dict[Instant, float] = {"loss": 0.1, "backward": 10.0, "rest": 10.0}
"""How long an instant waits for what nobody claims to go; after the loss activations stay, some of which were sent."""


class _Claim:
    """What is claimed of one storage: bytes so far, by which places, and the category that came first."""

    def __init__(self, storage: Storage, category: str) -> None:
        self.storage = storage
        self.category = category
        self.bytes = 0
        self.places: set[tuple[object, ...]] = set()

    def take(self, tensor: torch.Tensor) -> int:
        """The bytes of the tensor that nobody had; none where a tensor of the same place had them all."""
        place = tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype
        if place in self.places:
            return 0
        self.places.add(place)
        taken = min(tensor_bytes(tensor), self.storage.bytes - self.bytes)
        self.bytes += taken
        return taken


def snapshot(tracker: StorageTracker, named: Iterable[tuple[str, str, torch.Tensor]], instant: Instant) -> Held:
    """Claim the live storages by (category, name, tensor), the first one first.

    A tensor has the bytes of its local part. Names that share a storage share its bytes; the same elements under a
    second name are not counted again, and what no name covers is padding of the category that came first. Lines of no
    bytes are left out, as are empty storages.
    """
    tracker.bury()
    claims: dict[int, _Claim] = {}
    lines: dict[str, int] = {}

    def add(category: str, name: str, size: int) -> None:
        if size:
            identity = line_id("held", category, name)
            lines[identity] = lines.get(identity, 0) + size

    for category, name, tensor in named:
        local = local_part(tensor)
        storage = tracker.storage_of(local)
        claim = claims.get(id(storage)) or claims.setdefault(id(storage), _Claim(storage, category))
        add(category, name, claim.take(local))
    _settle(tracker, claims, instant)
    for claim in claims.values():
        add("padding", claim.category, claim.storage.bytes - claim.bytes)
    rest = [storage for storage in tracker.live.values() if storage.bytes and id(storage) not in claims]
    for storage in rest:
        if storage.label is not None:
            add(*storage.label, storage.bytes)
    unclaimed = sorted((_unclaimed(storage) for storage in rest if storage.label is None), key=lambda one: -one.bytes)
    return Held(instant=instant, claimed=lines, unclaimed=tuple(unclaimed), total_bytes=tracker.current_bytes)


def _settle(tracker: StorageTracker, claims: Container[int], instant: Instant) -> None:
    """Wait while nobody claims something that may be on its way out; what is still there after a while is really held.

    A thread of gloo reports that a collective is done and drops its tensors only then; on a busy machine the instant
    would see them. And what only a cycle of Python objects still names is garbage, whenever it is collected.
    [torch: csrc/distributed/c10d/ProcessGroupGloo.cpp, runLoop]
    """

    def leaving() -> bool:
        return any(_may_leave(storage, claims, instant) for storage in tracker.live.values())

    if instant != "loss" and leaving():
        gc.collect()
        tracker.bury()
    deadline = time.monotonic() + PATIENCE_S[instant]
    while leaving() and time.monotonic() < deadline:
        time.sleep(0.001)
        tracker.bury()


def _may_leave(storage: Storage, claims: Container[int], instant: Instant) -> bool:
    """After the loss only what was sent, for all other unclaimed storages are activations."""
    wanted = storage.sent or instant != "loss"
    return wanted and storage.bytes > 0 and storage.label is None and id(storage) not in claims


def _unclaimed(storage: Storage) -> Unclaimed:
    return Unclaimed(
        bytes=storage.bytes,
        dtype=dtype_word(storage.dtype),
        shape=tuple(storage.shape),
        op=storage.op,
        phase=storage.phase,
    )
