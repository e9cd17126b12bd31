"""Launch commands, scripts and trainers' YAML as input of `check`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainledger.adapters.command_line import flags_of, preset_of
from trainledger.errors import BadInput, UsageError
from trainledger.service import check
from trainledger.service.checked import Checked

NO_VOCABULARY = (
    "--tensor-model-parallel-size 2 --num-layers 4 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 96"
)
# tatsu-lab/stanford_alpaca#223
ALPACA = r"""CUDA_VISIBLE_DEVICES=0,1,2,3,4 torchrun --nproc_per_node=5 --master_port=23456 train.py \
    --model_name_or_path /data/llama-7b \
    --fp16 True \
    --bf16 False \
    --per_device_train_batch_size 1 \
    --gradient_accumulation_steps 8 \
    --learning_rate 2e-5 \
    --fsdp "full_shard auto_wrap" \
    --tf32 False"""
# modelscope/ms-swift#5737
SWIFT = r"""megatron sft \
    --load ZhipuAI/GLM-4.5-Air-Base-mcore \
    --split_dataset_ratio 0.01 \
    --tensor_model_parallel_size 8 \
    --pipeline_model_parallel_size 4 \
    --expert_tensor_parallel_size 1 \
    --expert_model_parallel_size 16 \
    --micro_batch_size 2 \
    --global_batch_size 16 \
    --recompute_granularity full --recompute_method uniform --recompute_num_layers 1 \
    --max_length 4096 \
    --sequence_parallel true"""
SCRIPT = r"""#!/bin/bash
GPUS_PER_NODE=8
NNODES=2
TP=${TP:-4}
PP="2"
GBS=$((8*16))
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NNODES
)
MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --swiglu --vocab-size 128256
    --untie-embeddings-and-output-weights
)
# --pipeline-model-parallel-size 99
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${MODEL_ARGS[@]} \
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size ${PP} --sequence-parallel \
    --num-layers-per-virtual-pipeline-stage 4 \
    --micro-batch-size 1 --global-batch-size $GBS --seq-length 8192 \
    --bf16 --use-distributed-optimizer --recompute-granularity selective
"""
# axolotl-ai-cloud/axolotl: examples/llama-3/fft-8b-liger-fsdp.yaml
AXOLOTL = """base_model: NousResearch/Meta-Llama-3.1-8B
liger_fused_linear_cross_entropy: true
sequence_len: 4096
gradient_accumulation_steps: 4
micro_batch_size: 2
optimizer: adamw_torch_fused
learning_rate: 2e-5
bf16: auto
gradient_checkpointing: true
fsdp:
- full_shard
- auto_wrap
fsdp_config:
  fsdp_offload_params: true
  fsdp_sharding_strategy: FULL_SHARD
"""
FACTORY = """model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: {stage}
finetuning_type: {kind}
lora_rank: 8
lora_target: all
cutoff_len: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
bf16: true
"""


def checked(given: str, **flags: object) -> Checked:
    asked: dict[str, Any] = {"message": given, **flags}
    found = check.run(check.Request(**asked))
    assert isinstance(found, Checked)
    return found


def plan(found: Checked) -> Any:  # noqa: ANN401 - read field by field
    assert found.plan is not None
    return found.plan


def ids(found: Checked) -> set[str]:
    return {one.id for one in found.findings}


def test_a_command_of_the_trainer_is_a_plan() -> None:
    found = checked(ALPACA, seq=512)
    made = plan(found)
    assert (found.model, made.engine, made.zero_stage, made.gpus) == ("llama-2-7b", "fsdp1", 3, 5)
    assert (made.precision, made.mbs, made.gbs, made.recompute) == ("fp16", 1, 40, "none")
    assert found.settings is not None
    assert found.settings.path == "the command"
    assert {one.key for one in found.settings.unused} >= {"bf16", "tf32", "master_port"}


def test_a_script_of_megatron_has_its_own_variables_put_in(tmp_path: Path) -> None:
    path = tmp_path / "pretrain.sh"
    path.write_text(SCRIPT, encoding="utf-8")
    made = plan(checked(str(path)))
    assert (made.engine, made.tp, made.pp, made.vpp, made.dp, made.gpus) == ("megatron", 4, 2, 4, 2, 16)
    assert (made.zero_stage, made.gbs, made.seq, made.sp, made.schedule) == (1, 128, 8192, True, "interleaved")
    assert (made.precision, made.recompute) == ("bf16", "selective")


def test_the_sizes_of_a_script_are_the_model(tmp_path: Path) -> None:
    path = tmp_path / "pretrain.sh"
    path.write_text(SCRIPT, encoding="utf-8")
    named = checked(str(path), model="llama-3-8b")
    by_size = checked(str(path))
    states = [one.message for one in named.findings if one.id == "read-after-step-2"]
    assert states == [one.message for one in by_size.findings if one.id == "read-after-step-2"]
    assert (named.model, by_size.model) == ("llama-3-8b", "custom")


def test_megatron_of_ms_swift_has_its_defaults_and_breaks_its_rule() -> None:
    found = checked(SWIFT, gpus=64)
    made = plan(found)
    assert (found.model, made.precision, made.zero_stage, made.etp) == ("glm-4.5-air", "bf16", 1, 1)
    assert found.findings[0].id == "layers-divisible-by-pp"
    assert found.exit_code == 5


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        ("", "zero_stage", 0),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params", "zero_stage", 3),
        ("--fp8-format hybrid --fp8-recipe tensorwise", "precision", "fp8-tensorwise"),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 4", "recompute_layers", 4),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 4", "recompute", "uniform-4"),
        ("--recompute-activations --recompute-modules mlp core_attn", "recompute_parts", ("mlp", "core_attn")),
        ("--attention-backend unfused", "attention", "eager"),
        ("--optimizer sgd", "optimizer", "sgd-momentum"),
        ("--grad-reduce-in-bf16", "grad_dtype", "bf16"),
    ],
)
def test_arguments_of_megatron_are_flags(words: str, field: str, value: object) -> None:
    command = f"pretrain_gpt.py --tensor-model-parallel-size 1 --bf16 {words}"
    assert getattr(plan(checked(command, model="llama-3-8b", gpus=8)), field) == value


def test_yaml_of_axolotl_and_llama_factory_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(AXOLOTL, encoding="utf-8")
    found = checked(str(path), gpus=8)
    made = plan(found)
    assert (found.model, made.engine, made.offload, made.optimizer) == (
        "llama-3-8b", "fsdp1", ("parameters",), "adamw-fused",
    )  # fmt: skip
    assert (made.gbs, made.seq, made.recompute) == (64, 4096, "full")
    assert found.settings is not None
    whys = {one.key: one.why for one in found.settings.unused}
    assert "makes no logits" in whys["liger_fused_linear_cross_entropy"]
    path.write_text(FACTORY.format(stage="sft", kind="lora"), encoding="utf-8")
    used = checked(str(path), gpus=4).settings
    assert used is not None
    assert {one.flag for one in used.used} >= {"--lora-rank 8", "--lora-targets all-linear", "--seq 2048"}


def test_a_model_that_is_named_goes_over_that_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(AXOLOTL, encoding="utf-8")
    found = checked(str(path), gpus=8, model="llama-3.2-3b")
    assert found.model == "llama-3.2-3b"
    assert found.settings is not None
    assert "base_model" in {one.key for one in found.settings.unused}


def test_a_preference_loss_has_a_reference_and_pairs(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(FACTORY.format(stage="dpo", kind="full"), encoding="utf-8")
    found = checked(str(path), gpus=8)
    assert "dpo-doubles-batch" in ids(found)
    assert found.settings is not None
    assert "--frozen-copy 1" in {one.flag for one in found.settings.used}


def test_a_json_that_a_command_names_is_compared_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the trainer does: hendrycks/apps#9, shibing624/MedicalGPT#191."""
    monkeypatch.chdir(tmp_path)
    command = (
        "deepspeed --num_gpus 8 train.py --model_name_or_path llama-7b --per_device_train_batch_size 2 "
        "--gradient_accumulation_steps 8 --bf16 True --deepspeed ds.json"
    )
    Path("ds.json").write_text(
        '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}, "train_batch_size": "auto", '
        '"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}'
    )
    found = checked(command)
    assert (plan(found).engine, plan(found).zero_stage, plan(found).gbs) == ("deepspeed", 2, 128)
    assert "ds-trainer-mismatch" not in ids(found)
    Path("ds.json").write_text('{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true}, "train_batch_size": 64}')
    found = checked(command)
    said = [one.message for one in found.findings if one.id == "ds-trainer-mismatch"]
    assert len(said) == 2
    assert any("fp16.enabled true" in one and "bf16" in one for one in said)
    assert found.exit_code == 5


def test_fsdp_of_one_rank_shards_nothing() -> None:
    """tatsu-lab/stanford_alpaca#189."""
    made = plan(checked(ALPACA.replace("per_node=5", "per_node=1"), seq=512))
    assert (made.gpus, made.engine, made.zero_stage) == (1, "pytorch", 0)


def test_a_command_beside_a_message_is_its_plan() -> None:
    """tatsu-lab/stanford_alpaca#86."""
    text = (
        "torchrun --nproc_per_node=2 train.py --model_name_or_path ../llama-13b/ --fp16 True "
        '--per_device_train_batch_size 1 --fsdp "full_shard auto_wrap" --model_max_length 512\n'
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 606.00 MiB (GPU 1; 79.18 GiB total)"
    )
    found = check.run(check.Request(message=text))
    assert isinstance(found, check.Response)
    assert (found.model, found.plan.gpus, found.plan.engine) == ("llama-2-13b", 2, "fsdp1")
    assert found.candidates[0].amount == 317_204_480 * 2


@pytest.mark.parametrize(
    ("command", "flags", "says"),
    [
        (
            "train.py --model_name_or_path llama-7b --per_device_train_batch_size $BS",
            {},
            "nothing here assigns it one value",
        ),
        ("train.py --model_name_or_path llama-7b --bf16 maybe", {}, "bf16 is 'maybe': write true or false"),
        ("train.py --model_name_or_path llama-7b --fp8 true", {}, "fp8 says no recipe"),
        ("train.py --model_name_or_path llama-7b --use_peft true --load_in_8bit true", {}, "weights of 8 bits"),
        ("x --tensor-model-parallel-size 2 --use-torch-fsdp2", {"model": "llama-3-8b"}, "is another engine"),
        ("x --tensor-model-parallel-size 2 --num-experts 8", {}, "a model with experts.*give --model"),
        ("x --tensor-model-parallel-size 2 --swiglu --num-layers 4", {}, "the model has no --hidden-size"),
        (
            f"x --swiglu {NO_VOCABULARY}",
            {},
            "no --vocab-size or --padded-vocab-size; give --model or --vocab",
        ),
        ("x --tensor-model-parallel-size 1e400", {"model": "llama-3-8b"}, "write a whole number"),
        ("x --tensor-model-parallel-size nan", {"model": "llama-3-8b"}, "write a whole number"),
        ("x --tensor-model-parallel-size two", {"model": "llama-3-8b"}, "'two': write a whole number"),
    ],
)
def test_what_a_command_leaves_open_is_refused(command: str, flags: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        checked(command, **flags)


def test_a_model_of_ones_own_has_to_be_named() -> None:
    with pytest.raises(
        UsageError, match=r"model_name_or_path \./mine, which is no model that comes with the package; give"
    ):
        checked("train.py --model_name_or_path ./mine --per_device_train_batch_size 1")
    with pytest.raises(UsageError, match=r"--gpus 5, and --gpus 8 is given"):
        checked(ALPACA, gpus=8)


def test_words_after_a_flag_are_its_values() -> None:
    assert flags_of("a --x=1 --y b c --no-z # --w\n--v '1 2'") == {
        "x": "1", "y": ["b", "c"], "no_z": True, "v": "1 2",
    }  # fmt: skip
    assert preset_of("NousResearch/Meta-Llama-3-8B-Instruct") == "llama-3-8b"
    assert preset_of("/models/my-own") is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        # a comment, also between lines that go on
        ("a --x 1 # --x 2\n --y \\\n # --z 3 \\\n --w '#'", {"x": "1", "y": True, "w": "#"}),
        # what ends a command ends the values of its last flag
        ("a --x; b 1", {"x": True}),
        ("a --x 2>&1 | tee log", {"x": True}),
        ("A=(\n --x 1\n --y\n)\ntorchrun ${A[@]} t.py", {"x": "1", "y": True}),
        # a text of several lines, in quotes, and flags in quotes
        ('A="\n --x 1 \\\n --y\n"\ntorchrun $A t.py', {"x": "1", "y": True}),
        ('A+=(\n "--x 1"\n "--y \'9,1\'"\n)\nt.py ${A[@]}', {"x": "1", "y": "9,1"}),
        ('sh -c "python t.py --x 1 --y"', {"x": "1", "y": True}),
        # what is printed is of no program
        ('echo "usage: --x N"; t.py --x 2', {"x": "2"}),
        # a variable of two values has none
        ("if a; then\nN=1\nelse\nN=8\nfi\nt.py --x $N", {"x": "$N"}),
        ('N=${NODES:-"2"}\nt.py --x $N', {"x": "2"}),
        ("N=2;M=3\nt.py --x $N", {"x": "2"}),
        ("N=$((2**3))\nt.py --x $N", {"x": "$"}),
    ],
)
def test_a_script_is_read_as_a_shell_reads_it(text: str, found: dict[str, Any]) -> None:
    assert flags_of(text) == found


def test_variables_that_name_each_other_do_not_grow_without_end() -> None:
    lines = "\n".join(f'V{number}="{f"$V{number + 1} " * 99}"' for number in range(8))
    assert flags_of(f"{lines}\nt.py --x 1 --y $V0")["x"] == "1"


@pytest.mark.timeout(10)
@pytest.mark.parametrize("part", ["${A:-", "${A[", "$((1+", 'A="', "A=$A\n", "(", "--a "])
def test_a_text_that_is_no_command_takes_no_long_time(part: str) -> None:
    assert "b" not in flags_of(part * ((1 << 18) // len(part) + 1) + " --b 1")


def test_a_script_of_several_runs_is_refused_where_they_differ() -> None:
    two = "t.py --model_name_or_path llama-7b --per_device_train_batch_size {} --output_dir {}\n"
    with pytest.raises(
        BadInput, match="per_device_train_batch_size stands there as 1 and as 2; give the command of one"
    ):
        checked(two.format(1, "a") + two.format(2, "b"), gpus=1)
    assert plan(checked(two.format(1, "a") + two.format(1, "b"), gpus=1)).mbs == 1


def test_a_batch_that_nothing_says_is_that_of_transformers() -> None:
    command = "train.py --model_name_or_path llama-7b --bf16 True --gradient_accumulation_steps 2"
    assert (plan(checked(command, gpus=4)).mbs, plan(checked(command, gpus=4)).gbs) == (8, 64)
    assert (plan(checked(command, gpus=4, mbs=2)).mbs, plan(checked(command, gpus=4, mbs=2)).gbs) == (2, 16)
