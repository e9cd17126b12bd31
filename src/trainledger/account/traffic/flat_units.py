"""Data-parallel traffic of FSDP's flat parameters: one call for each.

A block is one, the root with both ends, and each side of each adapter. Under no_sync gradients are reduced with the
last micro-batch of a step, and what stays gathered stays until then; else each micro-batch is reduced. Bytes include
the padding of every flat parameter to a multiple of the ranks. [fsdp1]
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trainledger.account.shares import Shares, flat_unit_bytes, flat_unit_elements
from trainledger.account.traffic.collectives import Collective, collective
from trainledger.account.traffic.side import Side
from trainledger.dtypes import bytes_of
from trainledger.inventory.inventory import Inventory


def flat_unit_traffic(inventory: Inventory, own: Shares) -> Iterator[Collective]:
    """Gathers for each use at zero_stage 3, the root's once; all once at 2; one reduction of each, and the norm."""
    side, setting = Side(inventory, own, expert=False), inventory.setting
    gathered, reduce = setting.dtype("gathered"), setting.dtype("reduce")
    table, at = own.table, own.table.at
    trained = flat_unit_elements(own, table.trainable)
    adapters = own.total(own.shapes.copies * table.trainable) * (not table.trainable.all())
    sizes = flat_unit_bytes(own, gathered)
    whole = np.einsum("us,urs->ur", sizes, own.counts)
    root = sizes[:, at.embedding][:, None] * (own.counts[:, :, at.embedding] > 0)
    units, roots = np.einsum("us,urs->ur", sizes > 0, own.counts) + adapters, (root > 0).astype(np.int64)
    full, kept, batches = side.once(3), side.once(2), side.batches
    times = 1 if setting.profile.memory.no_sync else batches
    calls = kept * times * units + full * batches * (2 * units - roots)
    total = kept * times * whole + full * batches * (2 * whole - root)
    yield side.fixed("all_gather", "weights", gathered, calls, total, "fsdp1")
    calls = times * np.where(adapters > 0, adapters, units)
    total = bytes_of(times * np.einsum("us,urs->ur", trained, own.counts), reduce)
    yield side.fixed("reduce_scatter", "gradients", reduce, calls, total, "fsdp1-no-sync")
    yield side.across(reduce, calls, total, "fsdp1")
    if count := setting.profile.traffic.norm_all_reduces:
        size = bytes_of(np.ones_like(own.pp_stage), "fp32")
        yield collective("all_reduce", "world", "gradient norm", "fp32", own.plans.gpus, count * roots, size, "fsdp1")
