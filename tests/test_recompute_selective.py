"""Selective recomputation: what runs forward again of a layer is multiplied and sent again, and nothing else is."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from strategies import calls_of, dense, latent, plan_of, routed, setting_of
from trainledger.account.again import matrices_again, spared_matrix
from trainledger.account.flop import step_flop
from trainledger.facts.cluster import find_accelerator
from trainledger.facts.model import Block, Model
from trainledger.facts.workload import Workload
from trainledger.inventory.blocks import sizes as block_sizes
from trainledger.inventory.blocks import titan
from trainledger.inventory.blocks.titan.builder import Builder
from trainledger.inventory.inventory import Inventory
from trainledger.plans.setting import Setting

SEQ, HIDDEN, FFN, LAYERS = 256, 64, 96, 4
X = SEQ * HIDDEN * 2
"""Bytes of one hidden tensor in bf16."""
PRODUCT = 2 * SEQ
"""FLOP of one element of a matrix in one pass of a micro-batch."""


def under(model: Model, recompute: str, *parts: str, engine: str = "megatron", release: str = "") -> Setting:
    return setting_of(
        model,
        Workload(seq=SEQ),
        engine=engine,
        framework_version=release,
        recompute=recompute,
        recompute_parts=parts,
    )


def flop_of(setting: Setting, **columns: object) -> dict[str, int]:
    return {name: int(np.asarray(n)[0].sum()) for name, n in step_flop(Inventory(setting), plan_of(**columns)).items()}


def more(model: Model, *parts: str, engine: str = "megatron", release: str = "", **columns: object) -> dict[str, int]:
    """FLOP that selective recomputation adds, of the operations that it adds any to."""
    none = flop_of(under(model, "none", engine=engine, release=release), **columns)
    some = flop_of(under(model, "selective", *parts, engine=engine, release=release), **columns)
    return {name: some[name] - none[name] for name in none if some[name] != none[name]}


ATTENTION = 2 * SEQ * SEQ * HIDDEN * 2 * LAYERS
"""Two products forward, of every query and key and 8 heads of 8, in each layer."""


@pytest.mark.parametrize("engine", ["megatron", "paper"])
def test_core_attention_forms_its_two_products_again(engine: str) -> None:
    assert more(dense(), "core_attn", engine=engine) == {"attention_forward": ATTENTION}
    assert more(dense(), engine=engine) == {"attention_forward": ATTENTION}
    assert more(dense(), "core_attn", engine=engine, tp=2, num_microbatches=3) == {
        "attention_forward": 3 * ATTENTION // 2
    }


@pytest.mark.parametrize(
    ("model", "part", "expected"),
    [
        (dense(), "mlp", {"matmul": PRODUCT * 3 * HIDDEN * FFN * LAYERS}),
        (routed(), "mlp", {}),
        # router of 8 experts, and two experts of three matrices for each token
        (
            routed(),
            "moe",
            {"matmul": PRODUCT * 8 * HIDDEN * LAYERS, "grouped_matmul": PRODUCT * 2 * 3 * HIDDEN * FFN * LAYERS},
        ),
        # one dense layer of six
        (latent(), "mlp", {"matmul": PRODUCT * 3 * HIDDEN * FFN}),
        (latent(), "shared_experts", {"matmul": PRODUCT * 3 * HIDDEN * 32 * 5}),
        # 8 heads of 12 from 24, and of 8 + 8 from 20
        (latent(), "mla_up_proj", {"matmul": PRODUCT * (8 * 12 * 24 + 8 * 16 * 20) * 6}),
        (dense(), "mla_up_proj", {}),
        (latent(), "layernorm", {}),
        (routed(), "moe_act", {}),
    ],
)
def test_a_part_multiplies_its_own_matrices_again(model: Model, part: str, expected: dict[str, int]) -> None:
    assert more(model, part) == expected


def test_shared_experts_run_once_more_inside_of_the_experts() -> None:
    inside, alone = more(latent(), "moe"), more(latent(), "shared_experts")
    assert more(latent(), "moe", "shared_experts") == inside
    assert inside["matmul"] == alone["matmul"] + PRODUCT * 16 * HIDDEN * 5


def counts(setting: Setting, what: str, **columns: object) -> dict[str, tuple[int, int]]:
    """(calls, bytes on the whole side) of each collective of one kind."""
    found: dict[str, tuple[int, int]] = {}
    for call in calls_of(setting, **columns):
        if call.what == what:
            found[call.op] = (call.count, max(call.in_bytes, call.out_bytes))
    return found


def added(
    model: Model, what: str, *parts: str, engine: str = "megatron", **columns: object
) -> dict[str, tuple[int, int]]:
    """Calls and bytes that selective recomputation adds."""
    none = counts(under(model, "none", engine=engine), what, **columns)
    some = counts(under(model, "selective", *parts, engine=engine), what, **columns)
    assert some.keys() == none.keys()
    return {op: (some[op][0] - n, some[op][1] - size) for op, (n, size) in none.items()}


@pytest.mark.parametrize(
    ("model", "part", "times"),
    [
        (dense(), "mlp", 4),
        (dense(), "core_attn", 0),
        (latent(), "mlp", 1),
        (latent(), "shared_experts", 5),
        (latent(), "moe", 5),
    ],
)
def test_a_network_that_runs_again_gathers_and_scatters_again(model: Model, part: str, times: int) -> None:
    again = (times, times * X)
    assert added(model, "hidden", part, tp=2, sp=1) == {"all_gather": again, "reduce_scatter": again}
    assert added(model, "hidden", part, tp=2) == {"all_reduce": again}


def test_experts_that_run_again_send_their_tokens_again() -> None:
    """Two of six exchanges of a layer: there and back."""
    tokens = SEQ * 2 * HIDDEN * 2
    columns: dict[str, Any] = {"tp": 2, "etp": 2, "ep": 2, "dp_shard": 2}
    again = {"all_to_all": (2 * LAYERS, 2 * LAYERS * tokens)}
    again |= dict.fromkeys(("all_gather", "reduce_scatter"), (LAYERS, LAYERS * tokens * 2))
    assert added(routed(), "routed tokens", "moe", **columns) == again
    assert set(added(routed(), "routed tokens", "moe_act", **columns).values()) == {(0, 0)}


def test_core_attention_passes_keys_and_values_on_again() -> None:
    kv = 128 * 4 * 16 * 2
    """Half of the tokens, 4 heads of keys and values."""
    found = added(dense(), "k and v", "core_attn", cp=4)
    assert found["send"] == (3 * LAYERS, 3 * LAYERS * kv // 2)
    assert added(dense(), "k, v and gradients", "core_attn", cp=4)["send"] == (0, 0)
    assert added(dense(), "k and v", "mlp", cp=4)["send"] == (0, 0)


@pytest.mark.parametrize(
    ("release", "again"),
    [
        # qkv, gate and down are kept: the first, third and fifth
        ("", HIDDEN * HIDDEN + HIDDEN * FFN),
        # q, v, gate and down are
        ("2026-03", 32 * HIDDEN + HIDDEN * HIDDEN + HIDDEN * FFN),
    ],
)
def test_operations_chosen_one_by_one_multiply_every_second_matrix_again(release: str, again: int) -> None:
    assert more(dense(), engine="torchtitan", release=release) == {"matmul": PRODUCT * again * LAYERS}


def test_experts_are_none_of_the_operations_that_are_kept() -> None:
    router, output = 8 * HIDDEN, HIDDEN * HIDDEN
    assert more(routed(), engine="torchtitan") == {
        "matmul": PRODUCT * (router + output) * LAYERS,
        "grouped_matmul": PRODUCT * 2 * 3 * HIDDEN * FFN * LAYERS,
    }


@pytest.mark.parametrize(("release", "again"), [("2025-07", ATTENTION), ("2025-12", 0)])
def test_attention_of_cudnn_is_not_kept_by_a_release_that_lists_flash_alone(release: str, again: int) -> None:
    card = find_accelerator("b200")
    none, some = (
        flop_of(dataclasses.replace(under(dense(), how, engine="torchtitan", release=release), accelerator=card))
        for how in ("none", "selective")
    )
    assert some["attention_forward"] - none["attention_forward"] == again


def test_gathers_run_again_one_by_one_and_sums_that_are_kept_do_not() -> None:
    pair = (2 * LAYERS, 2 * LAYERS * X)
    found = added(dense(), "hidden", engine="torchtitan", tp=2, sp=1)
    assert found == {"all_gather": pair, "reduce_scatter": (0, 0)}
    assert added(dense(), "hidden", engine="torchtitan", tp=2) == {"all_reduce": pair}
    gathered = added(dense(), "k and v", engine="torchtitan", cp=2)
    assert gathered == {"all_gather": (2 * LAYERS, LAYERS * SEQ * 4 * 16 * 2)}
    assert added(routed(), "routed tokens", engine="torchtitan", ep=2, dp_shard=2)["all_to_all"] == (0, 0)


@pytest.mark.parametrize("release", ["", "2026-03", "2024-04"])
@pytest.mark.parametrize("model", [dense(), routed(), latent()], ids=["dense", "routed", "latent"])
def test_the_tape_of_a_block_runs_the_same_matrices_again(model: Model, release: str) -> None:
    """Elements of the weights of what it does not keep; a checkpoint that stops early spares a last one."""
    setting = under(model, "selective", engine="torchtitan", release=release)
    plans = plan_of()
    for block in model.blocks:
        build = Builder(block_sizes.Sizes(setting, plans), selective=True)
        titan._layer(build, block, build.program.input("input", np.array([X])))
        again = sum(
            int(np.sum(nbytes)) // 2
            for op in build.program.ops
            for name, nbytes in op.weights
            if not op.pinned and ("projection" in name or "router" in name)
        )
        names = set(matrices_again(setting, block))
        if not setting.profile.traffic.recompute_reruns_last and len(chosen_among(block)) % 2 == 0:
            names.add(spared_matrix(block))
        assert sum(tensor.numel * tensor.copies for tensor in block.tensors if tensor.name in names) == again


def chosen_among(block: Block) -> list[str]:
    """Those of which every second is kept; the last is one that is not where they are even in number."""
    return [t.name for t in block.tensors if t.linear and t.role in ("attention", "mlp", "shared_expert")]
