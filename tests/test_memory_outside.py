"""What a run holds outside of its steady step, against what users reported and against plain arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from command_line import answer, run
from strategies import dense, owned, routed, setting_of
from trainledger.account.ledger import entry
from trainledger.account.memory import stage_memory
from trainledger.account.memory.outside import Outside, outside
from trainledger.account.shares import shares
from trainledger.facts.model import Model
from trainledger.facts.workload import Workload
from trainledger.inventory.inventory import Inventory
from trainledger.plans.plan import make_plans
from trainledger.profiles import PROFILES, releases
from trainledger.service import ledger
from trainledger.service.common import prepared
from trainledger.service.requests import PlanRequest

GIB = 1 << 30
LLAMA_2_70B = 68_976_648_192
LLAMA_3_8B = 8_030_261_248


def lines_of(**flags: object) -> dict[str, Outside]:
    """Every line of one plan by what it is of."""
    _, plans, inventory = prepared(PlanRequest(**flags))  # type: ignore[arg-type]
    found = entry(inventory, plans)
    return {line.what: line for line in outside(inventory, found.own, found.stages)}


def small(
    model: Model, workload: Workload | None = None, /, *, plan: Mapping[str, int], **scenario: object
) -> dict[str, int]:
    """The amounts of a small model."""
    inventory, plans = Inventory(setting_of(model, workload, **scenario)), make_plans(plan)
    own = shares(inventory, plans)
    return {line.what: line.amount for line in outside(inventory, own, stage_memory(inventory, plans))}


def test_without_zero_init_a_card_holds_the_whole_model_once() -> None:
    """deepspeedai/DeepSpeed#4527: 6805 M parameters on 4 GPUs, all offloaded, take 14678 MiB after initialize."""
    flags = {"model": "6805000000", "gpus": 4, "engine": "deepspeed", "zero": 3}
    offloaded = lines_of(**flags, offload=("optimizer", "parameters"))
    whole = offloaded["initialize without zero.Init: the whole model on each GPU"]
    assert (whole.amount, whole.place, whole.per, whole.basis) == (2 * 6_805_000_000, "device", "rank", "exact")
    assert whole.cites == ("deepspeed-initialize",)
    assert "model built under zero.Init: shards" not in offloaded
    kept = lines_of(**flags)
    assert kept["model built under zero.Init: shards"].amount == 2 * 6_805_000_000 // 4


def test_an_elastic_load_has_all_partitions_on_every_rank_of_a_node() -> None:
    """deepspeedai/DeepSpeed#1525: 256 files of 525 MB, 12 B of 11.2 B parameters, 8 times on a node: 1.0752 TB."""
    found = lines_of(model="11200000000", gpus=256, engine="deepspeed", zero=2)
    line = found["resuming with elastic_checkpoint: all partitions of the optimizer"]
    assert (line.amount, line.place, line.per) == (525_000_000 * 256 * 8, "host", "node")
    own = found["resuming: weights and own partition of the optimizer"]
    assert own.amount == 8 * (2 * 11_200_000_000 + 525_000_000)


def test_every_rank_that_reads_a_whole_checkpoint_has_it_in_host_memory() -> None:
    """huggingface/blog#1412: a 70B model in fp32, 8 ranks of a node: 2.2 TB; read by one rank, 276 GB."""
    found = lines_of(model="llama-2-70b", gpus=16, engine="pytorch", zero=3, cluster="dgx-a100-80gb")
    every, alone = (
        found["checkpoint read whole by every rank"],
        found["checkpoint read whole by rank 0, which broadcasts"],
    )
    assert (every.amount, every.per, every.basis) == (8 * 4 * LLAMA_2_70B, "node", "exact")
    assert (alone.amount, alone.per) == (4 * LLAMA_2_70B, "node")
    assert found["full state dict on rank 0: weights and optimizer"].amount == 12 * LLAMA_2_70B
    assert found["model on the GPU before it is sharded"].amount == 4 * LLAMA_2_70B
    assert found["model sharded from the meta device"].amount == 4 * LLAMA_2_70B // 16


def test_without_a_cluster_the_ranks_of_a_node_are_assumed() -> None:
    found = lines_of(model="llama-2-70b", gpus=2, engine="pytorch", zero=3)
    assert found["checkpoint read whole by every rank"].amount == 2 * 4 * LLAMA_2_70B
    assert found["checkpoint read whole by every rank"].basis == "assumed"


def test_adapters_save_little_but_a_gathered_model_does_not_fit() -> None:
    """meta-llama/llama-cookbook#332: a 70B model in bf16 with adapters trains on 48 GB cards, and not its saving."""
    flags: dict[str, Any] = {
        "model": "llama-2-70b",
        "gpus": 8,
        "engine": "pytorch",
        "precision": "bf16-pure",
        "zero": 3,
    }
    gathered = lines_of(**flags, lora_rank=8)["full state dict on the GPU: weights"]
    assert gathered.amount == pytest.approx(2 * LLAMA_2_70B, rel=1e-3)
    notes = ledger.account(PlanRequest(**flags, lora_rank=8, gpu="l40s", seq=2048)).notes
    told = [note.message for note in notes if note.rule == "outside-step"]
    assert any(message.startswith("saving: full state dict on the GPU") for message in told)
    assert not any("meta device" in message for message in told)


def test_a_model_is_whole_before_it_is_quantised() -> None:
    """Lightning-AI/litgpt#1262: 138 GB of 16-bit weights before 37 GB in 4 bits."""
    found = lines_of(model="llama-2-70b", gpus=1, engine="pytorch", zero=0, lora_rank=8, qlora=True)
    assert found["weights in 16 bits before they are quantised"].amount == pytest.approx(2 * LLAMA_2_70B, rel=1e-3)
    assert "checkpoint read whole by every rank" not in found
    plain = lines_of(model="llama-2-70b", gpus=1, engine="pytorch", zero=0, lora_rank=8)
    assert "weights in 16 bits before they are quantised" not in plain


@pytest.mark.parametrize(
    ("measured_gib", "within", "flags"),
    [
        # pytorch/torchtitan#929 and #1884: the first line of the log, of what is reserved
        (39.92, 0.01, {"gpus": 8, "framework_version": "2025-03-07", "compile": "on", "recompute": "selective"}),
        (33.21, 0.02, {"gpus": 4, "framework_version": "2025-10-15", "cp": 2, "recompute": "full"}),
    ],
)
def test_the_first_step_reads_less(measured_gib: float, within: float, flags: dict[str, Any]) -> None:
    """Moments take 8 B of each parameter, and exist from the end of the first step on."""
    request = PlanRequest(model="llama-3-8b", gpu="h100-96gb", engine="torchtitan", zero=3, seq=8192, mbs=1, **flags)
    _, plans, inventory = prepared(request)
    found = entry(inventory, plans)
    stages = found.stages
    before = max(int(stages.total(i)[0].max()) for i, p in enumerate(stages.places) if p.states != "step")
    first = {line.what: line.amount for line in outside(inventory, found.own, stages)}
    assert before - first["first forward and backward"] == pytest.approx(8 * LLAMA_3_8B / flags["gpus"], rel=1e-4)
    assert first["first step, reserved"] / GIB == pytest.approx(measured_gib, rel=within)


def test_an_optimizer_step_can_be_the_peak_of_the_first_step() -> None:
    found = lines_of(model="llama-2-70b", gpus=16, engine="pytorch", zero=3, recompute="full")
    # 4 B each of weights, gradients, two moments and the roots of the foreach step
    assert found["first step, allocated"].amount == pytest.approx(20 * LLAMA_2_70B / 16, rel=1e-3)
    assert found["first forward and backward"].amount < found["first step, allocated"].amount


@pytest.mark.parametrize(
    ("engine", "zero", "more"),
    [
        ("deepspeed", 0, {}),
        ("deepspeed", 2, {"offload": ("optimizer",)}),
        ("pytorch", 3, {"offload": ("parameters",)}),
        ("pytorch", 3, {"optimizer": "sgd"}),
    ],
)
def test_a_first_step_is_like_the_others_without_late_moments_on_the_card(
    engine: str, zero: int, more: dict[str, Any]
) -> None:
    """DeepSpeed's wrapper of stage 0 makes moments at once, offloading keeps them on the host, SGD has none."""
    found = lines_of(model="llama-3-8b", gpus=8, engine=engine, zero=zero, **more)
    assert not any(line.when == "first step" for line in found.values())


def test_one_page_locked_storage_takes_a_power_of_two() -> None:
    """DeepSpeed pins the partition's master, gradients and 16-bit copy, of 4, 4 and 2 B of 1.5 G parameters here."""
    found = lines_of(model="1500000000", gpus=1, engine="deepspeed", zero=2, offload=("optimizer",))
    master, copy = 6_000_000_000, 3_000_000_000
    assert found["offloaded states"].amount == 18 * 1_500_000_000
    rounding = 2 * ((1 << 33) - master) + (1 << 32) - copy
    assert found["page-locked memory beyond what it holds"].amount == rounding
    assert found["offloaded states of a node"].amount == 18 * 1_500_000_000 + rounding


def test_sub_groups_are_pinned_one_by_one() -> None:
    """ZeRO-3 pins one buffer of 16-bit gradients, and fp32 gradients in sub-groups of 1e9 parameters: 1 + 0.5 here."""
    found = lines_of(model="1500000000", gpus=1, engine="deepspeed", zero=3, offload=("optimizer",))
    rounding = (1 << 32) - 3_000_000_000 + ((1 << 32) - 4_000_000_000) + ((1 << 31) - 2_000_000_000)
    assert found["page-locked memory beyond what it holds"].amount == rounding


def test_each_offloaded_shard_of_fsdp_is_pinned_alone() -> None:
    ranks, rounding = 3, 0
    for piece in owned(dense()):
        shard = 4 * -(-piece.rows // ranks) * piece.rest
        rounding += piece.times * 2 * ((1 << (shard - 1).bit_length()) - shard)  # weights and gradients
    plan = {"dp_shard": ranks, "zero_stage": 3}
    found = small(dense(), plan=plan, engine="pytorch", offload=("parameters",))
    assert found["page-locked memory beyond what it holds"] == rounding > 0
    assert "model sharded from the meta device" not in found


@pytest.mark.parametrize("plan", [{"tp": 2, "dp_shard": 2}, {"pp": 4}, {"pp": 2, "vpp": 2, "dp_shard": 2}])
def test_the_whole_of_a_model_does_not_depend_on_the_plan(plan: dict[str, int]) -> None:
    one = small(dense(), plan={"zero_stage": 3}, engine="pytorch")
    many = small(dense(), plan={**plan, "zero_stage": 3, "num_microbatches": 4}, engine="pytorch")
    for what in ("full state dict on rank 0: weights", "full state dict on rank 0: weights and optimizer"):
        assert one[what] == many[what]
    assert one["full state dict on rank 0: weights"] == 4 * sum(p.numel * p.times for p in owned(dense()))
    laid_out = small(
        dense(), plan={"pp": 2, "zero_stage": 3, "num_microbatches": 4}, engine="pytorch", pp_layout=(1, 3)
    )
    assert laid_out["full state dict on rank 0: weights"] == one["full state dict on rank 0: weights"]


def test_a_checkpoint_has_one_copy_of_the_weights() -> None:
    plan = {"dp_shard": 2, "zero_stage": 3}
    alone = small(dense(), plan=plan, engine="pytorch")
    beside = small(dense(), Workload(frozen_copy=1, ema=True), plan=plan, engine="pytorch")
    for what in ("full state dict on rank 0: weights and optimizer", "asynchronous save: own shards staged"):
        assert alone[what] == beside[what]


def test_shards_that_are_staged_are_those_that_are_held() -> None:
    """3 fp32 of each element, rows rounded up."""
    shard = sum(4 * -(-piece.rows // 3) * piece.rest * piece.times for piece in owned(dense()))
    found = small(dense(), plan={"dp_shard": 3, "zero_stage": 3}, engine="torchtitan")
    assert found["checkpoint.async_mode: own shards staged"] == 3 * shard
    assert found["model made from the meta device: shards"] == shard


def test_stacked_experts_are_one_tensor_to_read() -> None:
    found = small(routed(), plan={"dp_shard": 2, "zero_stage": 3}, engine="torchtitan")
    assert found["distributed checkpoint read in place, tensor by tensor"] == 4 * 8 * 64 * 96


def test_megatron_gathers_the_optimizer_on_one_rank_or_stages_shards() -> None:
    plan = {"tp": 2, "dp_shard": 2, "zero_stage": 1}
    found = small(dense(), plan=plan, engine="megatron")
    owns = sum(piece.numel * piece.times for piece in owned(dense(), tp=2, vocab_multiple=128))
    assert found["ckpt-format torch: optimizer gathered on data-parallel rank 0"] == 12 * owns
    # padding of the buffers is the rest
    assert 7 * owns <= found["ckpt-format torch_dist: own shards staged"] < 7 * owns * 1.05
    built = found["weights as they are made, and the buffers that they are moved into"]
    assert 8 * owns <= built < 8 * owns * 1.05


def test_engines_that_nobody_read_say_nothing() -> None:
    plan = {"tp": 2, "zero_stage": 1}
    assert small(dense(), plan=plan) == {}
    assert small(dense(), plan=plan, engine="megatron", framework_version="zero-bubble") == {}


@pytest.mark.parametrize("engine", PROFILES)
def test_lines_of_an_engine_have_names_of_their_own(engine: str) -> None:
    for profile in releases(engine):
        names = [row.what for row in profile.outside]
        assert len(set(names)) == len(names)
        assert not any("@" in name or "/" in name for name in names)
        assert all(row.cite and row.parts for row in profile.outside)


def test_sizes_of_passing_buffers_are_not_remembered() -> None:
    """Sizes are remembered by the identity of a buffer, which another may have once it is gone."""
    inventory = Inventory(setting_of(dense(), engine="pytorch"))
    plans = make_plans({"dp_shard": 2, "zero_stage": 3})
    own = shares(inventory, plans)
    outside(inventory, own, stage_memory(inventory, plans))
    assert set(own.sizes) <= {id(buffer) for buffer in inventory.buffers}


FLAGS = ("ledger", "llama-3-8b", "--gpus", "8", "--engine", "pytorch", "--zero", "3")


def test_the_answer_has_the_lines_as_json_and_as_text() -> None:
    lines = answer(*FLAGS)["memory"]["outside"]
    assert [line["when"] for line in lines] == sorted(
        (line["when"] for line in lines), key=["load", "first step", "all the time", "save"].index
    )
    assert set(lines[0]) == {"what", "when", "place", "per", "amount", "basis", "formula", "cites"}
    shown = run(*FLAGS).out
    assert "outside the step" in shown
    assert all(line["what"] in shown for line in lines)


def test_a_line_explains_itself() -> None:
    found = answer(*FLAGS, "--explain", "full state dict on the GPU")
    assert found["line"]["id"] == "held/outside/full state dict on the GPU: weights"
    assert found["line"]["amount"] == 4 * LLAMA_3_8B
    assert [source["key"] for source in found["references"]] == ["torch-state-dict"]
    on_host = answer(*FLAGS, "--explain", "read whole by rank 0")
    assert on_host["line"]["id"].endswith("@host")


def test_what_loads_or_saves_beyond_its_node_is_told() -> None:
    flags: dict[str, Any] = {"model": "llama-2-70b", "gpus": 64, "cluster": "dgx-h100", "engine": "pytorch", "zero": 3}
    told = [note.message for note in ledger.account(PlanRequest(**flags)).notes if note.rule == "outside-step"]
    assert any("checkpoint read whole by every rank" in message and "the node has" in message for message in told)
    assert not any("rank 0" in message for message in told)
