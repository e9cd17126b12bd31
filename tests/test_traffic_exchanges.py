"""What PyTorch's ring of keys and values and the exchange of tokens move, by hand.

The numbers of calls and bytes are those that runs on CPU ranks issued (tests/test_runtime_context.py, _expert.py).
"""

from __future__ import annotations

import pytest

from strategies import calls_of, dense, latent, one_call, plan_of, routed, setting_of
from trainledger.account.shares import shares
from trainledger.account.traffic import all_traffic
from trainledger.facts.workload import Workload
from trainledger.inventory.inventory import Inventory

LAYERS, HIDDEN, SEQ = 4, 64, 1024
WORK = Workload(seq=SEQ)
MODEL = dense(vocab=256)
BATCHES = 3
KV_ELEMENTS = SEQ * 2 * 4 * 8
"""Keys and values of one sequence: 4 KV heads of 8."""


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_hop_of_the_ring_is_an_all_to_all_and_gradients_travel_in_fp32(cp: int, recompute: str) -> None:
    """cp - 1 hops a pass, forward, backward and again where recomputed; cp hops of the gradients."""
    setting = setting_of(MODEL, WORK, engine="pytorch", recompute=recompute)
    calls = [call for call in calls_of(setting, cp=cp, num_microbatches=BATCHES) if call.group == "cp"]
    kv, grads = (one_call(calls, "all_to_all", "cp", what) for what in ("k and v", "gradients of k, v"))
    passes = 3 if recompute == "full" else 2
    assert (kv.dtype, kv.count) == ("bf16", passes * BATCHES * LAYERS * (cp - 1))
    assert (grads.dtype, grads.count) == ("fp32", BATCHES * LAYERS * cp)
    for call, width in ((kv, 2), (grads, 4)):
        assert call.in_bytes == call.out_bytes == call.wire == call.count * KV_ELEMENTS // cp * width
    assert len(calls) == 2


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_gathered_keys_are_gathered_again_backward_and_their_gradients_still_hop(recompute: str) -> None:
    """One gather of k and v together a pass."""
    setting = setting_of(MODEL, WORK, engine="pytorch", recompute=recompute, cp_comm="all_gather")
    calls = [call for call in calls_of(setting, cp=4, num_microbatches=BATCHES) if call.group == "cp"]
    gathered = one_call(calls, "all_gather", "cp")
    assert gathered.count == (3 if recompute == "full" else 2) * BATCHES * LAYERS
    assert (gathered.in_bytes, gathered.out_bytes) == (
        gathered.count * KV_ELEMENTS // 4 * 2,
        gathered.count * KV_ELEMENTS * 2,
    )
    hops = one_call(calls, "all_to_all", "cp")
    assert (hops.count, hops.in_bytes) == (BATCHES * LAYERS * 4, BATCHES * LAYERS * KV_ELEMENTS * 4)
    assert len(calls) == 2


def test_values_of_latent_attention_travel_as_wide_as_the_keys() -> None:
    """8 heads of 12 for k, and of 8 for v: the flash kernels want one width."""
    setting = setting_of(latent(), WORK, engine="pytorch", recompute="none")
    kv = one_call(calls_of(setting, cp=2), "all_to_all", "cp", "k and v")
    assert kv.in_bytes == 2 * 6 * SEQ // 2 * 8 * (12 + 12) * 2


def test_a_rank_of_a_tensor_parallel_group_sends_its_own_heads() -> None:
    setting = setting_of(MODEL, WORK, engine="pytorch", recompute="none")
    whole, cut = (
        one_call(calls_of(setting, cp=2, tp=tp, sp=tp - 1), "all_to_all", "cp", "k and v").in_bytes for tp in (1, 2)
    )
    assert whole == 2 * cut


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_counts_go_ahead_of_tokens_and_routing_decides_one_side(recompute: str) -> None:
    """Backward, gradients of what came back go to the experts, and those of what was sent come home; no counts."""
    setting = setting_of(routed(), WORK, engine="pytorch", recompute=recompute)
    columns = {"ep": 4, "dp_shard": 4, "num_microbatches": BATCHES}
    calls = [call for call in calls_of(setting, **columns) if call.group == "ep"]
    forward = 2 if recompute == "full" else 1
    counts = one_call(calls, "all_to_all", "ep", "token counts")
    assert (counts.dtype, counts.count) == ("int64", forward * BATCHES * LAYERS)
    assert counts.in_bytes == counts.out_bytes == counts.count * 8 * 8
    for what in ("tokens to experts", "tokens back"):
        tokens = one_call(calls, "all_to_all", "ep", what)
        assert (tokens.dtype, tokens.count) == ("bf16", (forward + 1) * BATCHES * LAYERS)
        assert tokens.in_bytes == tokens.out_bytes == tokens.count * SEQ * 2 * HIDDEN * 2
        assert tokens.wire == tokens.in_bytes * 3 / 4
    assert len(calls) == 3
    inventory = Inventory(setting)
    found = all_traffic(inventory, shares(inventory, plan_of(**columns)))
    sides = {call.what: call.routed for call in found if call.group == "ep"}
    assert sides == {"token counts": "", "tokens to experts": "out", "tokens back": "in"}
    assert not [call.what for call in found if call.group != "ep" and call.routed]
