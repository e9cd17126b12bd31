"""What passes under FSDP2, counted by hand: gathered units, their gradients, and the inputs of reductions."""

import dataclasses

import msgspec
import numpy as np
import pytest

from strategies import plan_of, setting_of
from trainledger.account.memory.engines.fsdp2 import Fsdp2
from trainledger.account.shares import shares
from trainledger.facts.model import Model
from trainledger.facts.presets import load_preset
from trainledger.inventory.inventory import Inventory

MODEL = load_preset("llama-3-8b")
EMBEDDING, BLOCK, FINAL = 0, 1, 2
ENDS = MODEL.vocab_size * MODEL.hidden_size
E, H = ENDS, ENDS + MODEL.hidden_size
"""Elements of the embedding, and of the last norm and the output layer."""
B = sum(t.numel * t.copies for t in MODEL.blocks[0].tensors)


def passing(release: str, model: Model = MODEL, **plan: object) -> Fsdp2:
    inventory = Inventory(setting_of(model, engine="torchtitan", framework_version=release))
    return Fsdp2(inventory, shares(inventory, plan_of(**{"zero_stage": 3, "dp_shard": 8, **plan})))


def bytes_at(found: Fsdp2, part: str, slot: int, *, first: bool = False) -> int:
    return int(found.at(part, slot, first)[0].max())  # type: ignore[arg-type]


def test_forward_a_block_is_there_twice_beside_what_stays_gathered() -> None:
    apart, together = passing("2025-08"), passing("2025-06")
    assert bytes_at(apart, "forward", BLOCK) == 2 * B * 2
    assert bytes_at(together, "forward", BLOCK) == 2 * B * 2 + 2 * (E + H)


def test_at_the_loss_the_output_layer_stays_and_before_july_2025_the_last_block_too() -> None:
    for part in ("forward", "backward"):
        assert bytes_at(passing("2025-08"), part, FINAL, first=True) == 2 * H
        assert bytes_at(passing("2025-06"), part, FINAL, first=True) == 2 * (E + H) + 2 * B


def test_backward_the_next_unit_is_gathered_and_the_reduction_before_holds_its_input() -> None:
    apart = passing("2025-08")
    # the output layer's shard is there, which the states do not count at the loss
    assert bytes_at(apart, "backward", BLOCK, first=True) == 2 * B + 2 * B + 4 * H + 4 * H // 8
    # at the last block the embedding is gathered; its own shard and the embedding's are not there yet
    assert bytes_at(apart, "backward", BLOCK) == 2 * B + 2 * E + 4 * B - 4 * (B + E) // 8


def test_the_second_block_lies_beside_the_reduction_of_the_first() -> None:
    apart, together = passing("2025-08"), passing("2025-06")
    assert bytes_at(apart, "second", BLOCK, first=True) == 2 * B + 2 * B + 4 * B + 4 * (B + H) // 8
    assert bytes_at(together, "second", BLOCK, first=True) == 2 * (E + H) + 2 * H + 2 * B + 2 * B + 4 * B + 4 * B // 8
    never = passing("2025-08", zero_stage=2)
    blocks = 2 * (E + MODEL.num_layers * B)
    assert bytes_at(never, "second", BLOCK, first=True) == blocks - 2 * B + 4 * B + 4 * (B + H) // 8


def test_a_unit_is_reduced_from_an_input_in_fp32_beside_its_gradients() -> None:
    apart, together = passing("2025-08"), passing("2025-06")
    assert bytes_at(apart, "handed", FINAL, first=True) == (2 + 4) * H + 2 * B
    assert bytes_at(apart, "handed", BLOCK, first=True) == (2 + 4) * B + 2 * B + 4 * H // 8
    assert bytes_at(apart, "handed", EMBEDDING) == (2 + 4) * E - 4 * E // 8
    # the root unit is reduced at the end of the backward, from both ends of the model
    assert bytes_at(together, "handed", FINAL, first=True) == 2 * (E + H) + 2 * B
    assert bytes_at(together, "handed", EMBEDDING) == (2 + 4) * (E + H) - 4 * (E + H) // 8
    # until then the gradient of the output layer waits
    assert bytes_at(together, "backward", BLOCK, first=True) == 2 * (E + H) + 2 * H + 2 * B + 2 * B
    assert bytes_at(together, "handed", BLOCK, first=True) == 2 * (E + H) + 2 * H + (2 + 4) * B + 2 * B


def test_with_more_micro_batches_every_shard_is_there() -> None:
    more = passing("2025-08", num_microbatches=2)
    assert bytes_at(more, "handed", EMBEDDING) == (2 + 4) * E


def test_weights_that_are_never_dropped_are_all_there_until_their_backward() -> None:
    never = passing("2025-08", zero_stage=2)
    everything = 2 * (E + H + MODEL.num_layers * B)
    assert bytes_at(never, "forward", FINAL) == everything
    # the output layer has run backward
    assert bytes_at(never, "backward", BLOCK, first=True) == everything - 2 * H + 4 * H + 4 * H // 8
    assert bytes_at(never, "handed", BLOCK, first=True) == everything - 2 * H - 2 * B + 6 * B + 4 * H // 8


def test_replicas_copy_a_unit_and_gather_nothing() -> None:
    assert bytes_at(passing("2025-08", zero_stage=0, dp_shard=1, dp_replicate=8), "forward", BLOCK) == 2 * B


def test_in_a_pipeline_only_gradients_pass_for_the_states_have_what_is_gathered() -> None:
    piped = passing("2025-08", pp=4, num_microbatches=8)
    assert bytes_at(piped, "forward", BLOCK) == 0
    assert set(piped.handed(BLOCK, first=True).flatten().tolist()) == {2 * B}
    assert bytes_at(piped, "none", -1) == 0
    # no shard is there before the last micro-batch
    counts = piped.own.counts[0]
    layers, ends = counts[:, BLOCK], E * counts[:, EMBEDDING] + H * counts[:, FINAL]
    shards = 4 * (layers * B + ends) // 8
    assert piped.backward(BLOCK, first=False).tolist() == [(-shards).tolist()]
    # nor when all have: then the first unit lets go of its weights and is reduced
    first = np.where(counts[:, EMBEDDING] > 0, 2 * E, 2 * B)
    assert piped.at("end", -1, False).tolist() == [(first - shards).tolist()]  # as places ask


def test_a_tied_embedding_is_one_unit_with_the_output_layer() -> None:
    tied = load_preset("llama-3.2-1b")
    found = passing("2025-08", tied)
    table = tied.vocab_size * tied.hidden_size + tied.hidden_size
    assert bytes_at(found, "forward", FINAL) == 2 * table


def test_an_output_layer_that_is_dropped_after_its_forward_is_gone_at_the_loss() -> None:
    setting = setting_of(MODEL, engine="torchtitan", framework_version="2025-08")
    traffic = msgspec.structs.replace(setting.profile.traffic, final_unit_kept=False)
    inventory = Inventory(
        dataclasses.replace(setting, profile=msgspec.structs.replace(setting.profile, traffic=traffic))
    )
    found = Fsdp2(inventory, shares(inventory, plan_of(zero_stage=3, dp_shard=8)))
    assert bytes_at(found, "forward", FINAL, first=True) == 0


def test_the_last_block_is_that_of_the_last_layer_whatever_its_kind() -> None:
    model = load_preset("deepseek-v2-lite")
    found = passing("2025-08", model)
    dense, routed = (sum(t.numel * t.copies for t in block.tensors) for block in model.blocks)
    after = model.vocab_size * model.hidden_size + model.hidden_size
    assert int(found.handed(3, first=True)[0].max()) == (2 + 4) * after + 2 * routed
    embedding, before = 2 * model.vocab_size * model.hidden_size, 4 * dense
    assert int(found.backward(0, first=False)[0].max()) == embedding + before - 2 * embedding // 8


def test_a_first_dimension_that_the_ranks_do_not_divide_is_padded() -> None:
    block = MODEL.blocks[0]
    odd = msgspec.structs.replace(MODEL, blocks=(block,), vocab_size=MODEL.vocab_size)
    whole, padded = passing("2025-08", odd), passing("2025-08", odd, dp_shard=7)
    rows = sum((-t.shape[0] % 7) * t.numel // t.shape[0] for t in block.tensors)
    assert int(padded.weights[0, BLOCK] - whole.weights[0, BLOCK]) == 2 * rows


@pytest.mark.parametrize("gathered", ["bf16", "fp8"])
def test_units_travel_in_the_dtype_of_the_recipe(gathered: str) -> None:
    setting = setting_of(MODEL, engine="torchtitan", framework_version="2025-08")
    recipe = msgspec.structs.replace(setting.recipe, gathered=gathered)
    profile = msgspec.structs.replace(setting.profile, precision={"bf16": recipe})
    inventory = Inventory(dataclasses.replace(setting, profile=profile))
    found = Fsdp2(inventory, shares(inventory, plan_of(zero_stage=3, dp_shard=8)))
    norms = 2 * MODEL.hidden_size
    assert int(found.weights[0, BLOCK]) == (2 * B if gathered == "bf16" else B - norms + 2 * norms)
