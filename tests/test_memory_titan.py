"""What torchtitan has allocated: dry runs of the same program with fake tensors, measured runs, and how it scales.

Dry runs: Llama-3 8B with fewer layers, PyTorch 2.13 on fake CPU tensors under FSDPMemTracker, second step, AdamW, full
checkpoints; embedding, norm and output layer in the root unit and every block resharded, loss on `.float()`. They see
neither library workspaces nor what the caching allocator adds.
"""

import dataclasses

import msgspec
import numpy as np
import pytest

from strategies import plan_of, setting_of
from trainledger.account.memory import StageMemory, memory_of, stage_memory
from trainledger.facts.cluster import find_accelerator, find_cluster
from trainledger.facts.model import Model, Tensor
from trainledger.facts.presets import load_preset
from trainledger.facts.workload import Workload
from trainledger.inventory.blocks import parts_of
from trainledger.inventory.inventory import Inventory

GIB = 1 << 30


def shortened(layers: int, name: str = "llama-3-8b") -> Model:
    model = load_preset(name)
    block = msgspec.structs.replace(model.blocks[0], layers=tuple(range(layers)))
    return msgspec.structs.replace(model, blocks=(block,), num_layers=layers)


def memory(model: Model, seq: int, *, card: str = "", plan: dict[str, int], **scenario: object) -> StageMemory:
    setting = setting_of(model, Workload(seq=seq), engine="torchtitan", **scenario)
    if card:
        setting = dataclasses.replace(setting, accelerator=find_accelerator(card))
    return stage_memory(Inventory(setting), plan_of(**{"zero_stage": 3, **plan}))


def dry(model: Model, seq: int, plan: dict[str, int], **scenario: object) -> StageMemory:
    """As the dry runs were run."""
    setting = setting_of(model, Workload(seq=seq), engine="torchtitan", framework_version="2025-06", **scenario)
    rules = msgspec.structs.replace(setting.profile.memory, last_block_kept=False, workspace_bytes=0)
    profile = msgspec.structs.replace(setting.profile, memory=rules)
    return stage_memory(Inventory(dataclasses.replace(setting, profile=profile)), plan_of(**{"zero_stage": 3, **plan}))


@pytest.mark.parametrize(
    ("layers", "seq", "plan", "dry_gib", "place"),
    [
        (32, 4096, {"dp_shard": 8}, 20.343, "handed over after the backward of the embedding"),
        (16, 8192, {"dp_shard": 8}, 21.425, "backward of the output layer and loss"),
        (8, 8192, {"dp_shard": 64}, 15.039, "backward of the output layer and loss"),
        (4, 8192, {"dp_shard": 8, "tp": 8, "sp": 1, "mbs": 4}, 8.93, "backward of the output layer and loss"),
    ],
)
def test_full_checkpoints_are_allocated_as_a_dry_run_was(
    layers: int, seq: int, plan: dict[str, int], dry_gib: float, place: str
) -> None:
    found = dry(shortened(layers), seq, plan, recompute="full")
    assert found.allocated[0] / GIB == pytest.approx(dry_gib, rel=0.004)
    assert found.places[found.where()[0]].label.endswith(place)


@pytest.mark.parametrize(
    ("name", "plan", "recompute", "dry_gib"),
    [
        ("llama-3-70b", {"dp_shard": 8, "tp": 8, "sp": 1}, "full", 2.4723),
        ("llama-3-70b", {"dp_shard": 8, "tp": 8, "sp": 1}, "none", 3.9652),
        ("llama-3-8b", {"dp_shard": 8}, "none", 9.7036),
        ("llama-3-8b", {"dp_shard": 8}, "full", 5.5833),
    ],
)
def test_a_block_that_runs_backward_is_allocated_as_a_dry_run_was(
    name: str, plan: dict[str, int], recompute: str, dry_gib: float
) -> None:
    """Four layers over 1024 words, so that a block binds: what is there while it runs backward, cut and whole."""
    model = shortened(4, name)

    def small(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(
            msgspec.structs.replace(t, shape=(1024, *t.shape[1:])) if t.role in ("embedding", "head") else t
            for t in tensors
        )

    embedding, final = small(model.embedding), small(model.final)
    model = msgspec.structs.replace(model, vocab_size=1024, embedding=embedding, final=final)
    found = dry(model, 8192, plan, recompute=recompute)
    place = found.places[found.where()[0]]
    assert (place.label.partition(" of ")[0], place.slot) == ("backward", 1)
    assert found.allocated[0] / GIB == pytest.approx(dry_gib, rel=0.025)


def test_eager_blocks_keep_what_a_dry_run_kept() -> None:
    # after the forward: 5.6232 GiB of activations in four layers that nothing is recomputed of
    assert dry(shortened(4), 4096, {"dp_shard": 8}, recompute="none").saved[0, 0] / GIB == pytest.approx(
        5.6232, rel=2e-3
    )
    # its selective checkpoint kept every matrix, not every second: k, wo and w3 more, 9.5 widths of a token in 16 bits
    found = dry(shortened(4), 4096, {"dp_shard": 8}, recompute="selective").saved[0, 0]
    assert (found + 4 * 9.5 * 4096 * 4096) / GIB == pytest.approx(3.6856, rel=3e-3)


@pytest.mark.parametrize(
    ("recompute", "compiled", "widths"),
    [("none", "on", 37), ("selective", "on", 13.5), ("full", "on", 2), ("none", "off", 52), ("selective", "off", 15.5)],
)
def test_bytes_kept_per_token_and_block_in_widths_of_the_hidden_state(
    recompute: str, compiled: str, widths: float
) -> None:
    """Compiled: as AOTAutograd of PyTorch 2.13 partitions this block, traced on a CPU. Statistics come on top."""
    model, tokens = load_preset("llama-3-8b"), 4096
    release = {"framework_version": "2025-01", "recompute": recompute, "compile": compiled}
    more = memory(shortened(3), tokens, plan={"dp_shard": 8}, **release).saved[0, 0]
    fewer = memory(shortened(2), tokens, plan={"dp_shard": 8}, **release).saved[0, 0]
    statistics = 0 if recompute == "full" else 4 * 32 * tokens
    roots = 2 * 4 * tokens if recompute == "none" else 0
    assert more - fewer == widths * tokens * model.hidden_size + statistics + roots


ROWS = [
    # id, reserved GiB, model, seq, release, card, plan, scenario
    ("TAO-002", 52.7, "llama-3-8b", 4096, "2025-01", "", {"dp_shard": 8}, ("none", "off", "fp8-tensorwise")),
    ("TAO-003", 46.64, "llama-3-8b", 4096, "2025-01", "", {"dp_shard": 8}, ("none", "on", "fp8-tensorwise")),
    ("TAO-005", 40.97, "llama-3-8b", 4096, "2025-01", "", {"dp_shard": 8}, ("every-2", "off", "fp8-tensorwise")),
    ("TAO-006", 37.38, "llama-3-8b", 4096, "2025-01", "", {"dp_shard": 8}, ("every-2", "on", "fp8-tensorwise")),
    ("TAO-008", 28.07, "llama-3-8b", 4096, "2025-01", "", {"dp_shard": 8}, ("full", "off", "fp8-tensorwise")),
    ("TAO-009", 28.03, "llama-3-8b", 4096, "2025-01", "", {"dp_shard": 8}, ("full", "on", "fp8-tensorwise")),
    ("TAO2-001", 47.65, "llama-3-8b", 8192, "2025-03", "", {"dp_shard": 8}, ("selective", "on", "bf16")),
    ("TAO2-004", 39.09, "llama-3-8b", 8192, "2025-08", "", {"dp_shard": 8}, ("selective", "on", "bf16")),
    ("TAO2-010", 33.88, "llama-3-8b", 8192, "2025-08", "b200", {"dp_shard": 8}, ("selective", "on", "mxfp8")),
    ("TTN-031", 47.96, "llama-3-8b", 8192, "2025-06", "", {"dp_shard": 32, "mbs": 2}, ("selective", "on", "bf16")),
    ("TTN-032", 46.97, "llama-3-8b", 8192, "2025-06", "", {"dp_shard": 64, "mbs": 2}, ("selective", "on", "bf16")),
]


@pytest.mark.parametrize(("name", "reserved", "model", "seq", "release", "card", "plan", "how"), ROWS)
def test_a_measured_run_reserved_what_is_allocated_and_a_part_more(
    name: str,
    reserved: float,
    model: str,
    seq: int,
    release: str,
    card: str,
    plan: dict[str, int],
    how: tuple[str, str, str],
) -> None:
    """The caching allocator adds 5 to 36 %: most where large logits come after small activations were freed."""
    recompute, compiled, precision = how
    found = memory(
        load_preset(model),
        seq,
        card=card,
        plan=plan,
        framework_version=release,
        recompute=recompute,
        compile=compiled,
        precision=precision,
    )
    ratio = reserved * GIB / found.allocated[0]
    assert 1.05 < ratio < 1.36, name


@pytest.mark.parametrize(
    ("name", "reserved", "model", "seq", "plan", "within"),
    [
        # context parallelism over one node
        ("TTN-006", 84.0, "llama-3-8b", 131072, {"dp_shard": 2, "cp": 4}, 0.01),
        ("TTN-007", 84.5, "llama-3-8b", 262144, {"dp_shard": 1, "cp": 8}, 0.01),
        # pipelines over 64 nodes: as many micro-batches as virtual stages
        ("TTN-014", 72.7, "llama-3.1-405b", 8192, {"vpp": 2, "mbs": 2, "num_microbatches": 16}, 0.02),
        ("TTN-015", 75.3, "llama-3.1-405b", 32768, {"num_microbatches": 8}, 0.02),
        ("TTN-017", 77.1, "llama-3.1-405b", 131072, {"dp_shard": 2, "cp": 4, "num_microbatches": 8}, 0.02),
    ],
)
def test_reserved_memory_under_context_and_pipeline_parallelism(
    name: str, reserved: float, model: str, seq: int, plan: dict[str, int], within: float
) -> None:
    if model == "llama-3.1-405b":
        plan = {"dp_shard": 8, "tp": 8, "sp": 1, "pp": 8, **plan}
    schedule = "interleaved" if "vpp" in plan else "1f1b"
    scenario = {"framework_version": "2024-12", "compile": "on", "precision": "fp8-tensorwise", "schedule": schedule}
    setting = setting_of(load_preset(model), Workload(seq=seq), engine="torchtitan", recompute="full", **scenario)
    found = memory_of(Inventory(setting), plan_of(**{"zero_stage": 3, **plan}))
    assert found.meters["reserved"].estimate / GIB == pytest.approx(reserved, rel=within), name


def test_segments_grow_on_one_node_where_the_launcher_says_so() -> None:
    setting = setting_of(load_preset("llama-3-8b"), engine="torchtitan")
    assert [setting.allocator(gpus) for gpus in (1, 8, 16)] == ["expandable", "expandable", "default"]
    small = dataclasses.replace(setting, cluster=find_cluster("aws-p6e-gb200.36xlarge"))
    assert small.cluster is not None
    node = small.cluster.gpus_per_node
    assert [small.allocator(gpus) for gpus in (node, node + 1)] == ["expandable", "default"]
    chosen = setting_of(load_preset("llama-3-8b"), engine="torchtitan", allocator="expandable")
    assert chosen.allocator(512) == "expandable"
    amd = dataclasses.replace(setting, accelerator=find_accelerator("mi300x"))
    assert amd.allocator(8) == "default"


def test_segments_do_not_grow_where_pytorch_does_not_read_the_name_that_the_launcher_gives_the_setting() -> None:
    """From September 2025 to January 2026. pytorch/torchtitan#1884, of October: 44.84 GiB by the tenth step."""
    model, releases = load_preset("llama-3-8b"), ("2025-08", "2025-09", "2025-11", "2026-01-26", "2026-01-27")
    settings = [setting_of(model, engine="torchtitan", framework_version=release) for release in releases]
    assert [each.allocator(8) for each in settings] == ["expandable", "default", "default", "default", "expandable"]
    scenario = {"engine": "torchtitan", "framework_version": "2025-10-15", "recompute": "full"}
    plans = plan_of(dp_shard=2, cp=2, zero_stage=3)
    asked = {how: setting_of(model, Workload(seq=8192), **scenario, allocator=how) for how in ("", "expandable")}
    reserved = {how: memory_of(Inventory(setting), plans).meters["reserved"] for how, setting in asked.items()}
    assert reserved[""].estimate / GIB == pytest.approx(44.84, rel=0.01)
    assert reserved["expandable"].estimate / GIB < 0.93 * 44.84


def test_the_root_unit_and_the_loss_are_what_a_release_changed() -> None:
    """The same run on the releases of 2025-03 and 2025-08: the embedding is let go of, and the loss is compiled."""
    before, after = (
        memory(
            load_preset("llama-3-8b"),
            8192,
            plan={"dp_shard": 8},
            framework_version=day,
            recompute="selective",
            compile="on",
        )
        for day in ("2025-03", "2025-08")
    )
    model, tokens = load_preset("llama-3-8b"), 8192
    logits = tokens * model.vocab_size
    difference = int(before.allocated[0] - after.allocated[0])
    embedding = 2 * model.vocab_size * model.hidden_size
    block = 2 * sum(t.numel for t in model.blocks[0].tensors)
    norm = 4 * tokens * model.hidden_size
    # 12 against 4 bytes a logit, the embedding and the last block gathered, and a fused last norm
    assert difference == pytest.approx(8 * logits + embedding + block + norm, rel=0.01)


def test_attention_of_a_newer_card_was_not_kept_by_a_checkpoint_until_december_2025() -> None:
    def saved(release: str, card: str) -> int:
        scenario = {"framework_version": release, "recompute": "selective", "compile": "on"}
        return int(memory(load_preset("llama-3-8b"), 8192, card=card, plan={"dp_shard": 8}, **scenario).saved[0, 0])

    out = 32 * 8192 * (2 * 4096 + 4 * 32)
    assert saved("2025-08", "h100") - saved("2025-08", "b200") == out
    assert saved("2025-12", "h100") == saved("2025-12", "b200") == saved("2025-08", "h100")


def test_grouped_keys_and_values_need_no_copies_since_2026() -> None:
    def saved(release: str) -> int:
        scenario = {"framework_version": release, "recompute": "none", "compile": "on"}
        return int(memory(load_preset("llama-3-8b"), 4096, plan={"dp_shard": 8}, **scenario).saved[0, 0])

    # keys and values of 8 heads instead of 32: 2 x 2 x 3/4 widths
    assert saved("2025-12") - saved("2026-02") == 32 * 3 * 4096 * 4096


def test_one_matrix_for_queries_keys_and_values_is_kept_whole() -> None:
    def saved(release: str, recompute: str) -> int:
        scenario = {"framework_version": release, "recompute": recompute, "compile": "on"}
        return int(memory(load_preset("llama-3-8b"), 4096, plan={"dp_shard": 8}, **scenario).saved[0, 0])

    # of the three only queries and values were kept: the keys are a quarter of the queries
    assert saved("2026-08", "selective") - saved("2026-05", "selective") == 32 * 2 * 4096 * 4096 // 4
    assert saved("2026-08", "none") == saved("2026-05", "none")


def test_every_second_layer_is_half_way_between_none_and_all() -> None:
    def saved(recompute: str) -> int:
        scenario = {"framework_version": "2025-01", "recompute": recompute, "compile": "on"}
        return int(memory(shortened(8), 4096, plan={"dp_shard": 8}, **scenario).saved[0, 0])

    assert 2 * saved("every-2") == saved("none") + saved("full")
    assert saved("none") > saved("every-4") > saved("every-2") > saved("full")


@pytest.mark.parametrize("compiled", ["on", "off"])
@pytest.mark.parametrize("name", ["llama-3-8b", "qwen3-8b", "deepseek-v2-lite", "mixtral-8x7b"])
def test_recomputing_more_never_keeps_more(name: str, compiled: str) -> None:
    def found(how: str) -> StageMemory:
        return memory(load_preset(name), 8192, plan={"dp_shard": 8}, recompute=how, compile=compiled)

    saved = [int(found(how).saved[0, 0]) for how in ("full", "selective", "none")]
    assert saved == sorted(set(saved))
    assert found("full").allocated[0] < found("none").allocated[0]


def test_tensor_parallelism_divides_all_but_the_inputs_of_its_regions() -> None:
    def kept(recompute: str, **plan: int) -> int:
        scenario = {"framework_version": "2025-12", "recompute": recompute, "compile": "on"}
        three, two = (memory(shortened(n), 8192, plan={"dp_shard": 8, **plan}, **scenario).saved[0, 0] for n in (3, 2))
        return int(three - two)

    width = 8192 * 4096
    statistics, roots = 4 * 32 * 8192 // 8, 2 * 4 * 8192 // 8
    # both gathered inputs stay whole; the stream, queries, keys, values, attention, the stream and the network are cut
    assert kept("none", tp=8, sp=1) == (2 + 2) * width + (2 + 8 + 2 + 21) * width // 8 + statistics + roots
    # every second matrix, attention and what the first reduction gave
    assert kept("selective", tp=8, sp=1) == (2 + 2 + 0.5 + 2 + 2 + 7) * width // 8 + statistics
    assert kept("full", tp=8, sp=1) == 2 * width // 8
    assert kept("none", cp=4) * 4 == kept("none", mbs=2) // 2 == kept("none")


def test_many_plans_have_what_each_has_alone() -> None:
    setting = setting_of(load_preset("deepseek-v2-lite"), engine="torchtitan", recompute="selective")
    plans = plan_of(
        tp=np.array([1, 2, 1, 2, 1]),
        sp=np.array([0, 1, 0, 0, 0]),
        ep=np.array([1, 1, 4, 2, 1]),
        cp=np.array([1, 2, 1, 1, 1]),
        pp=np.array([1, 1, 1, 2, 4]),
        etp=1,
        dp_shard=8,
        zero_stage=np.array([3, 2, 3, 3, 2]),
        num_microbatches=np.array([1, 2, 1, 4, 8]),
    )
    inventory = Inventory(setting)
    together = stage_memory(inventory, plans).allocated
    alone = [int(stage_memory(inventory, plans.take(slice(i, i + 1))).allocated[0]) for i in range(len(plans))]
    assert together.tolist() == alone


@pytest.mark.parametrize(("name", "normed"), [("llama-4-scout-text", False), ("qwen3-8b", True)])
def test_queries_and_keys_are_normed_where_norms_have_weights_for_torchtitan_has_no_others(
    name: str, *, normed: bool
) -> None:
    setting = setting_of(load_preset(name), engine="torchtitan", recompute="none", compile="on")
    for tape in parts_of(Inventory(setting), plan_of(dp_shard=8, zero_stage=3)).blocks:
        assert any(storage.name.startswith("query norm") for storage in tape.storages) == normed


def test_a_compiled_loss_over_a_cut_vocabulary_makes_its_gradient_forward() -> None:
    """pytorch/torchtitan#1207, of May 2025: 45.68 GiB of four cards, tp 2, operations chosen for recomputation."""
    scenario = {"engine": "torchtitan", "framework_version": "2025-05-20", "recompute": "selective", "compile": "on"}
    setting = setting_of(load_preset("llama-3-8b"), Workload(seq=8192), **scenario)
    assert (setting.loss_of(cut=True), setting.loss_word(cut=True)) == ("compiled-parallel", "compiled")
    assert (setting.loss_of(cut=False), setting.loss_word(cut=False)) == ("compiled", "compiled")
    found = memory_of(Inventory(setting), plan_of(dp_shard=2, tp=2, sp=1, zero_stage=3))
    assert found.place == "forward of the output layer and loss"
    assert found.meters["reserved"].estimate / GIB == pytest.approx(45.68, rel=0.01)
