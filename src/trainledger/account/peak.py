"""Where and when a rank holds most, of one plan or of many, and how certain that is."""

from __future__ import annotations

import msgspec
import numpy as np

from trainledger.account.activations import activation_bytes
from trainledger.account.shares import shares
from trainledger.account.states import StateAccount, alive_at, buffer_bytes, on_host, plan_mask, state_account
from trainledger.arrays import IntArray
from trainledger.inventory.inventory import Inventory
from trainledger.inventory.tensors import BoolArray
from trainledger.lines import BASES, Basis
from trainledger.plans.plan import Plans
from trainledger.plans.setting import Setting
from trainledger.profiles.profile import CATEGORIES, INSTANTS, Category, Instant


class Peak(msgspec.Struct, frozen=True, kw_only=True):
    """Where and when a rank holds most: bytes by category at that stage, each at its own largest, and the total."""

    pp_stage: int
    instant: Instant
    by_category: dict[Category, int]
    at_instants: dict[Instant, int]
    states_bytes: int
    activations_bytes: int
    total_bytes: int
    host_bytes: int


def peak_of(account: StateAccount, activations: IntArray, plan: int = 0) -> Peak:
    """The stage and instant at which plan number `plan` holds most.

    Activations are alive at the loss; the states of every instant are compared with it.
    """
    row = int(account.index[plan])
    kept = activations[plan]
    totals = {i: account.at(i)[row] + (kept if i == "loss" else 0) for i in INSTANTS}
    stacked = np.stack([totals[i] for i in INSTANTS])
    where = int(np.argmax(stacked.max(axis=0)))
    instant = INSTANTS[int(np.argmax(stacked[:, where]))]
    return Peak(
        pp_stage=int(account.pp_stage[row, where]),
        instant=instant,
        by_category={c: int(account.largest(c)[row, where]) for c in CATEGORIES},
        at_instants={i: int(totals[i][where]) for i in INSTANTS},
        states_bytes=int(account.at(instant)[row, where]),
        activations_bytes=int(kept[where]),
        total_bytes=int(stacked[:, where].max()),
        host_bytes=int(account.host[row, where]),
    )


def peak_totals(account: StateAccount, activations: IntArray) -> IntArray:
    """[plans]: the largest total over stages and instants, for many plans."""
    other = np.maximum.reduce([account.at(i) for i in INSTANTS if i != "loss"]).max(axis=1)
    at_loss = (account.at("loss")[account.index] + activations).max(axis=1)
    return np.maximum(other[account.index], at_loss)


def single_peak(inventory: Inventory, plans: Plans) -> Peak:
    """The peak of a Plans of length one."""
    return peak_of(state_account(inventory, plans), activation_bytes(inventory, plans))


def total_bytes(inventory: Inventory, plans: Plans) -> IntArray:
    """[plans]: the most that any rank of each plan holds."""
    return peak_totals(state_account(inventory, plans), activation_bytes(inventory, plans))


def host_holds(setting: Setting, plans: Plans, account: StateAccount) -> BoolArray:
    """[plans]: where a rank's share of its node's memory holds what is offloaded; everywhere if it is not known."""
    cluster = setting.cluster
    if cluster is None or cluster.host_bytes is None:
        return np.ones(len(plans), dtype=np.bool_)
    share = cluster.host_bytes // np.minimum(cluster.gpus_per_node, plans.gpus)
    return account.host.max(axis=1)[account.index] <= share


def by_basis(inventory: Inventory, plans: Plans, peak: Peak) -> dict[Basis, int]:
    """Device bytes of a single plan at the stage and instant of its peak, by basis; bases that hold nothing left out.

    Activations are alive at the loss alone, and modelled. The values sum to `peak.total_bytes`; what is exact is a
    lower bound of the whole.
    """
    own = shares(inventory, plans)
    where = int(np.argmax(own.pp_stage[0] == peak.pp_stage))
    held: dict[Basis, int] = dict.fromkeys(BASES, 0)
    for buffer in inventory.buffers:
        if on_host(buffer, inventory.setting.offload_moves) or not plan_mask(plans, buffer)[0]:
            continue
        alive = alive_at(buffer, peak.instant, plans)
        if alive is not None and np.any(alive):
            held[buffer.row.basis] += int(buffer_bytes(own, buffer)[0, where])
    if peak.instant == "loss":
        held["modelled"] += peak.activations_bytes
    return {basis: amount for basis, amount in held.items() if amount}
