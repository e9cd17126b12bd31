"""Commands of ms-swift as input of `check`."""

from __future__ import annotations

from typing import Any

import pytest

from trainledger.errors import BadInput
from trainledger.service import check
from trainledger.service.checked import Checked

# modelscope/ms-swift#411
FULL = r"""CUDA_VISIBLE_DEVICES=0 \
swift sft \
    --sft_type full \
    --model_type openbuddy-mistral-7b-chat \
    --max_length 4096 \
    --save_only_model true \
    --use_flash_attn true \
    --learning_rate 1e-5"""
SHARDED = r"""NPROC_PER_NODE=8 \
swift sft \
    --model Qwen/Qwen2.5-32B-Instruct \
    --train_type full \
    --torch_dtype bfloat16 \
    --per_device_train_batch_size 1 \
    --max_length 8192 \
    --deepspeed zero3_offload"""


def checked(given: str, **flags: object) -> Checked:
    asked: dict[str, Any] = {"message": given, **flags}
    found = check.run(check.Request(**asked))
    assert isinstance(found, Checked)
    assert found.plan is not None
    return found


def test_without_deepspeed_adamw_trains_the_weights_as_they_are_loaded() -> None:
    found = checked(FULL, model="mistral-7b-v0.3", gpus=1, gpu="a100")
    assert found.plan is not None
    assert (found.plan.precision, found.plan.recompute, found.plan.num_microbatches) == ("bf16-pure", "full", 16)
    assert {"bf16-underflow", "foreach-transient"} <= {one.id for one in found.findings}


def test_settings_of_deepspeed_are_found_by_their_name_and_ranks_in_the_environment() -> None:
    found = checked(SHARDED, gpu="a100")
    assert found.plan is not None
    assert (found.model, found.plan.zero_stage, found.plan.precision, found.plan.dp) == (
        "qwen2.5-32b", 3, "bf16", 8,
    )  # fmt: skip
    assert found.plan.offload == ("optimizer", "parameters")
    assert found.plan.num_microbatches == 2


def test_ranks_may_be_a_variable() -> None:
    found = checked(SHARDED.replace("NPROC_PER_NODE=8", "n=4\nNPROC_PER_NODE=$n"), gpu="a100")
    assert found.plan is not None
    assert found.plan.gpus == 4
    with pytest.raises(BadInput, match=r"nproc_per_node is \$n, and nothing here assigns it one value"):
        checked(SHARDED.replace("NPROC_PER_NODE=8", "NPROC_PER_NODE=$n"))


def test_steps_of_accumulation_are_of_a_number_of_gpus() -> None:
    command = "swift sft --train_type full --model Qwen/Qwen2.5-7B --gradient_accumulation_steps 4"
    settings = checked(command).settings
    assert settings is not None
    assert {one.key for one in settings.unused if one.why.endswith("give --gpus")} == {"gradient_accumulation_steps"}
    settings = checked(command, gpus=2).settings
    assert settings is not None
    assert "gradient_accumulation_steps" not in {one.key for one in settings.unused}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("megatron sft --load_safetensors true --model Qwen/Qwen3-8B --tuner_type lora", "lora is trained by Megatron"),
        ("megatron rlhf --load_safetensors true --model Qwen/Qwen3-8B --rlhf_type dpo", "models beside the one"),
        ("megatron sft --load_safetensors true --model my/own", "names no model that comes with the package"),
    ],
)
def test_what_megatron_is_told_by_it_is_read_or_refused(words: str, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        checked(f"{words} --tensor_model_parallel_size 2", gpus=8)


def test_lora_is_what_a_tuner_of_that_name_trains() -> None:
    found = checked("swift sft --tuner_type lora --model Qwen/Qwen2.5-7B --target_modules all-linear", gpus=1)
    assert found.plan is not None
    assert found.settings is not None
    assert {"--lora-rank 8", "--lora-targets all-linear"} <= {one.flag for one in found.settings.used}
    assert found.plan.precision == "bf16"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("swift sft --train_type adalora --model Qwen/Qwen2.5-7B", "train_type is 'adalora', and only full, lora"),
        (
            "swift sft --train_type full --model Qwen/Qwen2.5-7B --torch_dtype int8",
            "torch_dtype is 'int8': write bfloat",
        ),
        (
            "swift sft --train_type full --model Qwen/Qwen2.5-7B --deepspeed zero9",
            "zero9 is named there, and is no file",
        ),
        ("swift sft --train_type lora --model Qwen/Qwen2.5-7B --quant_bits 8", "weights of 8 bits are counted by no"),
        ("x --finetuning_type freeze --model_name_or_path Qwen/Qwen2.5-7B", "finetuning_type is 'freeze', and only"),
    ],
)
def test_what_is_trained_otherwise_is_refused(given: str, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        checked(given, gpus=1)


def test_what_runs_beside_the_step_is_said_not_to_be_counted() -> None:
    found = checked(
        "swift rlhf --rlhf_type grpo --train_type lora --quant_bits 4 --model Qwen/Qwen2.5-7B --use_vllm true", gpus=1
    )
    assert found.settings is not None
    bounds = {one.key for one in found.settings.unused if one.why.endswith("a lower bound")}
    assert bounds == {"rlhf_type", "use_vllm"}
    assert "--qlora" in {one.flag for one in found.settings.used}
