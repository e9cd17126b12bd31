"""What a decoder of transformers keeps under DeepSpeed or accelerate, counted by hand from its modules."""

from __future__ import annotations

import pytest

from strategies import held, llama, plan_of, setting_of
from trainledger.account.memory.active import active
from trainledger.account.memory.stage import stage_memory
from trainledger.facts.workload import Workload
from trainledger.inventory.blocks import parts_of
from trainledger.inventory.inventory import Inventory
from trainledger.plans.setting import Setting

SEQ, VOCAB = 1024, 128256
H, F, KV = 4096, 14336, 1024
"""Llama-3-8B: hidden, feed-forward, and all key heads together."""
HEADS = 32
NORM = 4 * H + 4 + 2 * H + 2 * H
"""The input in fp32, the inverse root, what is cast back, and the result, which matrices keep."""
NETWORK = 4 * 2 * F
"""Gate and its activation, up, and their product."""


def setting(release: str = "", engine: str = "deepspeed", **words: object) -> Setting:
    chosen = {"engine": engine, "framework_version": release, "recompute": "none", **words}
    return setting_of(llama("8b"), Workload(seq=SEQ), **chosen)


@pytest.mark.parametrize(("release", "kept_kv"), [("0.14.2", H), ("", KV)])
def test_a_layer_keeps_norms_in_fp32_and_keys_for_each_query_head_in_older_releases(release: str, kept_kv: int) -> None:
    parts = parts_of(Inventory(setting(release)), plan_of(zero_stage=3, dp_shard=8))
    attention = 2 * H + 2 * 2 * kept_kv + 2 * H + 4 * HEADS
    assert int(parts.blocks[0].saved[0]) == SEQ * (2 * NORM + attention + NETWORK)


def test_a_recomputed_layer_keeps_its_input() -> None:
    parts = parts_of(Inventory(setting(recompute="full")), plan_of(zero_stage=3, dp_shard=8))
    assert int(parts.blocks[0].saved[0]) == SEQ * 2 * H


@pytest.mark.parametrize(("release", "logit"), [("0.14.2", 4), ("", 2)])
def test_a_loop_holds_the_logits_before_and_the_trainer_does_not(release: str, logit: int) -> None:
    plan = plan_of(zero_stage=3, dp_shard=8)
    found = [parts_of(Inventory(of), plan) for of in (setting(release), setting(engine="fsdp1"))]
    assert [int((parts.beside + 0 * plan.mbs)[0]) for parts in found] == [SEQ * VOCAB * logit, 0]


def test_older_releases_make_the_bucket_before_the_loss_runs_backward() -> None:
    old, new = (held(setting(release), dp_shard=8, zero_stage=2) for release in ("0.14.2", ""))
    assert old.bytes["buffers", "loss"] - new.bytes["buffers", "loss"] == 500_000_000 * 2
    assert old.at("backward") == new.at("backward")


def test_ranks_of_cp_exchange_heads_for_tokens_and_back() -> None:
    one, two = (active(Inventory(setting()), plan_of(cp=cp, zero_stage=3, dp_shard=4)) for cp in (1, 2))
    more = llama("8b").num_layers * (SEQ // 2) * 2 * H
    # what attention gave waits beside what it was exchanged for
    assert int(two.saved[0, 0]) == int(one.saved[0, 0]) // 2 + more


def test_four_gradients_of_a_logit_meet_what_the_loop_holds() -> None:
    setting_ = setting("0.14.2", recompute="full")
    memory = stage_memory(Inventory(setting_), plan_of(zero_stage=3, dp_shard=8, mbs=2))
    place, row = memory.where()
    kept = 32 * 2 * SEQ * 2 * H
    assert int(memory.places[place].active[0, row]) == pytest.approx(16 * 2 * SEQ * VOCAB + kept, rel=0.05)
