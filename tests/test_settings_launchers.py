"""Accelerate's YAML and torchtitan's TOML as input of `check`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainledger.adapters.yaml_text import parse_yaml
from trainledger.errors import BadInput, UsageError
from trainledger.service import check
from trainledger.service.checked import Checked

FSDP = """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: {wrap}
  fsdp_offload_params: {offload}
  fsdp_sharding_strategy: {strategy}
  fsdp_state_dict_type: SHARDED_STATE_DICT
mixed_precision: bf16
num_machines: 1
num_processes: 8
tpu_env: []
"""
# hiyouga/LlamaFactory#201
DEEPSPEED = """compute_environment: LOCAL_MACHINE
deepspeed_config:
  gradient_accumulation_steps: 4
  gradient_clipping: 0.5
  offload_optimizer_device: none
  offload_param_device: none
  zero3_init_flag: false
  zero_stage: 2
distributed_type: DEEPSPEED
mixed_precision: fp16
num_machines: 1
num_processes: 7
"""
TITAN = """[model]
name = "llama3"
flavor = "8B"
converters = ["float8"]

[training]
local_batch_size = 2
seq_len = 8192
steps = 1000

[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
pipeline_parallel_degree = 1
context_parallel_degree = 1

[activation_checkpoint]
mode = "selective"
selective_ac_option = "2"

[compile]
enable = true

[optimizer]
name = "AdamW"
lr = 3e-4
"""


def checked(folder: Path, name: str, text: str, **flags: object) -> Checked:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    asked: dict[str, Any] = {"message": str(path), **flags}
    found = check.run(check.Request(**asked))
    assert isinstance(found, Checked)
    return found


def fsdp(*, wrap: str = "TRANSFORMER_BASED_WRAP", offload: str = "false", strategy: str = "FULL_SHARD") -> str:
    return FSDP.format(wrap=wrap, offload=offload, strategy=strategy)


def test_fsdp_of_accelerate_is_fsdp1_unless_it_says_2(tmp_path: Path) -> None:
    found = checked(tmp_path, "a.yaml", fsdp(), model="llama-2-7b")
    assert found.plan is not None
    assert (found.plan.engine, found.plan.zero_stage, found.plan.gpus) == ("fsdp1", 3, 8)
    newer = "  fsdp_version: 2\n  fsdp_reshard_after_forward: false"
    two = fsdp().replace("  fsdp_sharding_strategy: FULL_SHARD", newer)
    found = checked(tmp_path, "a.yaml", two, model="llama-2-7b")
    assert found.plan is not None
    assert (found.plan.engine, found.plan.zero_stage) == ("pytorch", 2)


@pytest.mark.parametrize(
    ("strategy", "engine", "stage"),
    [("1", "fsdp1", 3), ("2", "fsdp1", 2), ("SHARD_GRAD_OP", "fsdp1", 2), ("NO_SHARD", "pytorch", 0)],
)
def test_a_strategy_is_a_name_or_a_number(tmp_path: Path, strategy: str, engine: str, stage: int) -> None:
    found = checked(tmp_path, "a.yaml", fsdp(strategy=strategy), model="llama-2-7b")
    assert found.plan is not None
    assert (found.plan.engine, found.plan.zero_stage) == (engine, stage)


def test_no_wrap_gathers_the_whole_model(tmp_path: Path) -> None:
    """huggingface/accelerate#3239: out of memory with all offloaded."""
    found = checked(tmp_path, "a.yaml", fsdp(wrap="NO_WRAP", offload="true"), model="llama-2-7b")
    (one,) = [one for one in found.findings if one.id == "fsdp-wrap"]
    assert one.severity == "warn"
    assert one.evidence[0].amount == 6_738_415_616 * 2
    assert found.plan is not None
    assert found.plan.offload == ("parameters",)
    assert "fsdp-wrap" not in {one.id for one in checked(tmp_path, "a.yaml", fsdp(), model="llama-2-7b").findings}


def test_deepspeed_of_accelerate_is_deepspeeds_own(tmp_path: Path) -> None:
    found = checked(tmp_path, "a.yaml", DEEPSPEED, model="llama-2-7b", mbs=4)
    assert found.plan is not None
    assert (found.plan.engine, found.plan.zero_stage, found.plan.gpus) == ("deepspeed", 2, 7)
    assert (found.plan.precision, found.plan.gbs) == ("fp16", 4 * 4 * 7)
    assert found.settings is not None
    assert {one.key for one in found.settings.unused} >= {"deepspeed_config.gradient_clipping"}


def test_a_file_that_it_names_is_read_from_beside_it(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}')
    text = "distributed_type: DEEPSPEED\nnum_processes: 4\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n"
    found = checked(tmp_path, "a.yaml", text, model="llama-2-7b")
    assert found.plan is not None
    assert (found.plan.zero_stage, found.plan.gpus) == (3, 4)
    assert found.settings is not None
    assert "zero_optimization.stage" in {one.key for one in found.settings.used}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (fsdp().replace("distributed_type: FSDP", "distributed_type: MEGATRON_LM"), "MULTI_GPU, DEEPSPEED, FSDP"),
        (fsdp(strategy="HALF"), "write FULL_SHARD or SHARD_GRAD_OP"),
        (fsdp().replace("bf16\n", "fp8\n"), "says no recipe"),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: ds.json\n", "write its keys on lines below it"),
        ("distributed_type: FSDP\n\tnum_processes: 8\n", "line 2: is no YAML"),
    ],
)
def test_what_is_not_read_is_refused_by_key(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        checked(tmp_path, "a.yaml", text, model="llama-2-7b")


@pytest.mark.parametrize(
    ("name", "text", "whose"),
    [
        ("a.yml", "pipe_parallel_size: 1\nzero_optimization:\n  stage: 1\n", "GPT-NeoX"),
        ("a.yaml", "max_duration: 1ba\ndevice_train_microbatch_size: 8\nfsdp_config: {}\n", "LLM Foundry"),
        ("a.yaml", "data_stages: []\nparallelism:\n  dp: 2\n", "nanotron"),
    ],
)
def test_settings_of_others_are_refused_by_name(tmp_path: Path, name: str, text: str, whose: str) -> None:
    """Though they have keys in common with those that are read."""
    with pytest.raises(BadInput, match=f"is {whose}'s, whose settings are not read; give what it says as flags"):
        checked(tmp_path, name, text, model="llama-3-8b")


def test_yaml_is_read_as_launchers_write_it() -> None:
    text = "a:\n  - x\n  - 2\nb: 1e-3  # of b\nc: 'x # y'\nd: {}\ne:\n  f:\n    g: no\n  h: null\ni: true\n"
    assert parse_yaml(text, where="x") == {
        "a": ["x", 2], "b": 0.001, "c": "x # y", "d": {}, "e": {"f": {"g": False}, "h": None}, "i": True,
    }  # fmt: skip
    assert parse_yaml("a: |\n  b: 1\n  c\nd: [{e: 'f: 1'}]\n", where="x") == {"a": "b: 1\nc\n", "d": [{"e": "f: 1"}]}
    assert parse_yaml("# nothing\n", where="x") == {}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: 1\nb: {c: 1, c: 2}\n", "line 2: the key 'c' stands twice"),
        ("a: &x {b: 1}\nc: *x\n", "line 1: an alias"),
        ("a: 1\n1: 2\n", "line 2: a key is no text"),
        ("- a\n", "line 1: the file is no mapping"),
        ("a: 1\n---\nb: 2\n", "line 2: is no YAML"),
        ("a: !!python/object:os.system x\n", "line 1: is no YAML"),
        ("a: 2024-99-99\n", "a value that cannot be read"),
        ("a: " + "[" * 3000, "is nested too deep"),
        ("a: \x00", "is no YAML"),
        ("a: b\n" * 20_000, "has 100,000 characters"),
    ],
)
def test_yaml_that_may_be_misread_is_refused_by_line(text: str, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        parse_yaml(text, where="x")


def test_a_toml_of_torchtitan_names_its_model_and_plan(tmp_path: Path) -> None:
    found = checked(tmp_path, "t.toml", TITAN, gpus=16)
    assert found.model == "llama-3-8b"
    plan = found.plan
    assert plan is not None
    assert (plan.engine, plan.tp, plan.dp, plan.mbs, plan.seq) == ("torchtitan", 2, 8, 2, 8192)
    assert (plan.recompute, plan.compile, plan.precision) == ("every-2", "on", "fp8-tensorwise")
    assert found.settings is not None
    assert {one.key for one in found.settings.unused} >= {"training.steps", "optimizer.lr"}


@pytest.mark.parametrize(
    ("before", "after", "field", "value"),
    [
        # its own defaults, and a table of validation that has the same keys
        ('selective_ac_option = "2"', "", "recompute", "every-2"),
        ("local_batch_size = 2", "", "mbs", 8),
        ("seq_len = 8192", "", "seq", 2048),
        ("[optimizer]", "[validation]\nlocal_batch_size = 7\nseq_len = 64\n\n[optimizer]", "mbs", 2),
        ('converters = ["float8"]', "[float8]\nenable_float8_linear = true", "precision", "fp8-tensorwise"),
        ("[optimizer]", '[quantize.linear.float8]\nrecipe_name = "rowwise"\n[optimizer]', "precision", "fp8-rowwise"),
    ],
)
def test_torchtitan_is_read_as_it_reads_itself(
    tmp_path: Path, before: str, after: str, field: str, value: object
) -> None:
    found = checked(tmp_path, "t.toml", TITAN.replace(before, after), gpus=16)
    assert getattr(found.plan, field) == value


def test_pipeline_stages_of_torchtitan_take_a_batch_in_parts(tmp_path: Path) -> None:
    text = TITAN.replace("local_batch_size = 2", "local_batch_size = 8").replace(
        "pipeline_parallel_degree = 1", 'pipeline_parallel_degree = 2\npipeline_parallel_schedule = "1F1B"'
    )
    plan = checked(tmp_path, "t.toml", text, gpus=16).plan
    assert plan is not None
    assert (plan.mbs, plan.gbs, plan.num_microbatches) == (1, 8 * 4, 8)
    told = text.replace("[activation", "pipeline_parallel_microbatch_size = 4\n\n[activation")
    plan = checked(tmp_path, "t.toml", told, gpus=16).plan
    assert plan is not None
    assert (plan.mbs, plan.num_microbatches) == (4, 2)
    older = text.replace("local_batch_size", "batch_size")
    with pytest.raises(BadInput, match=r"releases that have training\.batch_size part it over pipeline stages"):
        checked(tmp_path, "t.toml", older, gpus=16)
    older = older.replace("[activation", "[experimental]\npipeline_parallel_microbatches = 2\n\n[activation")
    plan = checked(tmp_path, "t.toml", older, gpus=16).plan
    assert plan is not None
    assert (plan.mbs, plan.num_microbatches) == (4, 2)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("tensor_parallel_degree = 2", "tensor_parallel_degree = 2\ndisable_loss_parallel = true"),
        ("lr = 3e-4", "early_step_in_backward = true"),
        ("[optimizer]", "[fault_tolerance]\nenable = true\n\n[optimizer]"),
    ],
)
def test_switches_of_torchtitan_that_are_not_counted_are_refused(tmp_path: Path, before: str, after: str) -> None:
    with pytest.raises(BadInput, match="is true, and no account here counts"):
        checked(tmp_path, "t.toml", TITAN.replace(before, after), gpus=16)


def test_degrees_of_torchtitan_that_do_not_fit_the_ranks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--tp 2, and --tp 4 is given"):
        checked(tmp_path, "t.toml", TITAN, gpus=16, tp=4)
    # pytorch/torchtitan#932: 32 heads and 8 of keys and values on 16
    wide = TITAN.replace("tensor_parallel_degree = 2", "tensor_parallel_degree = 16")
    found = checked(tmp_path, "t.toml", wide, gpus=16)
    assert found.findings[0].id == "heads-divisible-by-tp"
    assert found.exit_code == 5


def test_a_key_that_was_renamed_says_which_release_reads_the_file(tmp_path: Path) -> None:
    found = checked(tmp_path, "t.toml", TITAN, gpus=16)
    assert found.profile.framework_version == "2026-01-27"
    older = TITAN.replace("local_batch_size", "batch_size")
    assert checked(tmp_path, "t.toml", older, gpus=16).profile.framework_version == "2025-04-02"
    told = checked(tmp_path, "t.toml", older, gpus=16, framework_version="2024-12-18")
    assert told.profile.framework_version == "2024-12-18"


def test_a_dtype_of_torchtitan_that_is_not_counted_is_refused(tmp_path: Path) -> None:
    text = TITAN.replace("[training]", '[training]\nmixed_precision_param = "float16"')
    with pytest.raises(BadInput, match="write bfloat16 or float32"):
        checked(tmp_path, "t.toml", text, gpus=16)


def test_a_model_without_a_preset_is_asked_for(tmp_path: Path) -> None:
    text = TITAN.replace('flavor = "8B"', 'flavor = "debugmodel"')
    with pytest.raises(BadInput, match="no preset has the shapes of model llama3 debugmodel; give --model"):
        checked(tmp_path, "t.toml", text, gpus=16)
    assert checked(tmp_path, "t.toml", text, gpus=16, model="llama-3-8b").model == "llama-3-8b"
