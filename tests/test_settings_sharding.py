"""How commands and YAML of trainers say FSDP and DeepSpeed: files, words, a launcher's flags, or a program's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainledger.errors import BadInput
from trainledger.service import check
from trainledger.service.checked import Checked

TRAIN = "train.py --model_name_or_path llama-7b --per_device_train_batch_size 2"


def checked(given: str, **flags: object) -> Checked:
    asked: dict[str, Any] = {"message": given, **flags}
    found = check.run(check.Request(**asked))
    assert isinstance(found, Checked)
    assert found.plan is not None
    return found


def layout(found: Checked) -> tuple[str, int, tuple[str, ...]]:
    assert found.plan is not None
    return found.plan.engine, found.plan.zero_stage, found.plan.offload


@pytest.mark.parametrize(
    ("words", "engine", "stage"),
    [
        ('--fsdp "full_shard auto_wrap"', "fsdp1", 3),
        ('--fsdp "shard_grad_op auto_wrap"', "fsdp1", 2),
        ("--fsdp no_shard", "pytorch", 0),
        ("--fsdp False", "pytorch", 0),
        ('--fsdp "full_shard auto_wrap" --fsdp_version 2', "pytorch", 3),
    ],
)
def test_words_of_fsdp_are_its_strategy(words: str, engine: str, stage: int) -> None:
    assert layout(checked(f"{TRAIN} {words}", gpus=8))[:2] == (engine, stage)


def test_a_file_of_fsdp_is_read_beside_its_words(tmp_path: Path) -> None:
    file = tmp_path / "fsdp.json"
    file.write_text('{"version": 2, "reshard_after_forward": false}')
    assert layout(checked(f"{TRAIN} --fsdp full_shard --fsdp_config {file}", gpus=8)) == ("pytorch", 2, ())
    file.write_text('{"offload_params": true}')
    assert layout(checked(f"{TRAIN} --fsdp full_shard --fsdp_config {file}", gpus=8)) == ("fsdp1", 3, ("parameters",))
    file.write_text('{"offload_params": "false"}')
    with pytest.raises(BadInput, match="fsdp_offload_params is"):
        checked(f"{TRAIN} --fsdp full_shard --fsdp_config {file}", gpus=8)


def test_without_auto_wrap_the_model_is_one_unit() -> None:
    ids = {one.id for one in checked(f"{TRAIN} --fsdp full_shard", gpus=8).findings}
    assert "fsdp-wrap" in ids
    ids = {one.id for one in checked(f'{TRAIN} --fsdp "full_shard auto_wrap"', gpus=8).findings}
    assert "fsdp-wrap" not in ids


@pytest.mark.parametrize(
    "words", ["--deepspeed --zero_stage 3 --offload", "--zero_stage 2", "--deepspeed", "--deepspeed --dtype bf16"]
)
def test_settings_that_a_program_makes_are_asked_for(words: str) -> None:
    """DeepSpeedExamples: applications/DeepSpeed-Chat, get_train_ds_config."""
    with pytest.raises(BadInput, match="the program makes DeepSpeed's settings itself"):
        checked(f"{TRAIN} {words}", gpus=8)


def test_a_switch_and_a_file_are_how_deepspeed_itself_is_told(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}')
    found = checked(f"deepspeed --num_gpus 8 {TRAIN} --bf16 True --deepspeed --deepspeed_config {file}")
    assert layout(found) == ("deepspeed", 2, ())


def test_settings_of_deepspeed_may_stand_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        "model_name_or_path: llama-7b\nper_device_train_batch_size: 1\nbf16: true\n"
        "deepspeed:\n  zero_optimization: {stage: 3}\n  bf16: {enabled: auto}\n"
    )
    assert layout(checked(str(file), gpus=8)) == ("deepspeed", 3, ())


@pytest.mark.parametrize(
    ("words", "engine", "stage", "offload"),
    [
        ("--use_deepspeed --zero_stage 3 --offload_optimizer_device cpu", "deepspeed", 3, ("optimizer",)),
        ("--use_fsdp --fsdp_version 2 --fsdp_reshard_after_forward false", "pytorch", 2, ()),
        ("--use_fsdp --fsdp_sharding_strategy 2 --fsdp_offload_params true", "fsdp1", 2, ("parameters",)),
        ("--multi_gpu", "pytorch", 0, ()),
    ],
)
def test_flags_of_a_launcher_are_its_settings(words: str, engine: str, stage: int, offload: tuple[str, ...]) -> None:
    found = checked(f"accelerate launch {words} --num_processes 8 --mixed_precision=bf16 {TRAIN}")
    assert layout(found) == (engine, stage, offload)
    assert found.plan is not None
    assert found.plan.precision == "bf16"


def test_axolotl_trains_weights_in_bf16_where_nothing_copies_them(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    text = "base_model: NousResearch/Meta-Llama-3-8B\nmicro_batch_size: 1\nsequence_len: 2048\nbf16: auto\n"
    file.write_text(text)
    found = checked(str(file), gpus=1)
    assert found.plan is not None
    assert found.plan.precision == "bf16-pure"
    file.write_text(text + "adapter: lora\n")
    found = checked(str(file), gpus=1)
    assert found.plan is not None
    assert found.plan.precision == "bf16"


def test_degrees_of_a_launcher_are_degrees(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 16\nfsdp_config: {fsdp_version: 2}\n"
        "parallelism_config:\n  parallelism_config_tp_size: 2\n  parallelism_config_dp_replicate_size: 2\n"
        "  parallelism_config_dp_shard_size: 4\n  parallelism_config_cp_size: 1\ndynamo_config:\n  dynamo_backend: x\n"
    )
    found = checked(str(file), model="llama-2-7b")
    assert found.plan is not None
    assert (found.plan.tp, found.plan.dp_replicate, found.plan.dp) == (2, 2, 8)
    assert found.settings is not None
    assert "parallelism_config.parallelism_config_tp_size" in {one.key for one in found.settings.used}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("use_galore: true", "use_galore changes the optimizer's state"),
        ("additional_target: embed_tokens", "changes what is trained whole"),
        ("lora_modules_to_save: [embed_tokens, lm_head]", "changes what is trained whole"),
        ("unfrozen_parameters: ['^lm_head']", "changes which weights are trained"),
        ("mixture_of_depths: convert", "changes the model that is trained"),
        ("do_predict: true", "trains nothing"),
        ("deepspeed: [a.json]", "name its JSON, or write its keys below"),
        ("fsdp_config: [full_shard]", "fsdp takes words and fsdp_config keys"),
        ("fsdp: {full_shard: true}", "fsdp takes words and fsdp_config keys"),
    ],
)
def test_arguments_that_no_account_counts_are_refused(tmp_path: Path, line: str, says: str) -> None:
    """LLaMA-Factory: examples/extras; axolotl: examples."""
    file = tmp_path / "a.yaml"
    text = "model_name_or_path: llama-7b\nper_device_train_batch_size: 1\nfinetuning_type: lora\n"
    file.write_text(text + line)
    with pytest.raises(BadInput, match=says):
        checked(str(file), gpus=1)
    file.write_text(f"{text}use_galore: false\nadditional_target:\n")
    assert layout(checked(str(file), gpus=1))[0] == "pytorch"


def test_a_recipe_that_a_file_leaves_open_may_be_given(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    for text in (
        "distributed_type: FSDP\nmixed_precision: fp8\nnum_processes: 8\nfsdp_config: {fsdp_version: 2}\n",
        "model_name_or_path: llama-7b\nmicro_batch_size: 1\nfp8: true\nbf16: true\nfsdp_config: {fsdp_version: 2}\n",
    ):
        file.write_text(text)
        with pytest.raises(BadInput, match="says no recipe"):
            checked(str(file), model="llama-2-7b", gpus=8)
        found = checked(str(file), model="llama-2-7b", gpus=8, precision="fp8-rowwise")
        assert found.plan is not None
        assert found.plan.precision == "fp8-rowwise"


def test_a_batch_that_only_deepspeed_is_told_is_its_own(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(
        '{"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": true}}'
    )
    words = f"--model_name_or_path llama-7b --bf16 true --deepspeed --deepspeed_config {file}"
    found = checked(f"deepspeed --num_gpus 8 train.py {words} --gradient_accumulation_steps 2")
    assert found.plan is not None
    assert (found.plan.mbs, found.plan.gbs) == (4, 64)
    assert "ds-trainer-mismatch" not in {one.id for one in found.findings}


def test_ranks_of_a_launchers_file_make_the_batch(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\nfsdp_config: {}\n")
    found = checked(f"accelerate launch --config_file {file} {TRAIN} --gradient_accumulation_steps 4")
    assert found.plan is not None
    assert (found.plan.gpus, found.plan.mbs, found.plan.gbs) == (8, 2, 64)
