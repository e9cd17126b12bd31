"""DeepSpeed's JSON as input of `check`: each key is used, or named as not used, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from command_line import answer, run
from trainledger.errors import BadInput, UsageError
from trainledger.service import check
from trainledger.service.checked import Checked

ZERO = "zero_optimization"
BASE: dict[str, Any] = {
    "train_batch_size": 256,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "bf16": {"enabled": True},
    ZERO: {"stage": 3, "reduce_bucket_size": 5e8},
}
AUTO: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "initial_scale_power": 16},
    ZERO: {"stage": 2, "reduce_bucket_size": "auto", "offload_optimizer": {"device": "cpu", "pin_memory": True}},
}


def checked(folder: Path, config: dict[str, Any], **flags: object) -> Checked:
    path = folder / "ds_config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    asked: dict[str, Any] = {"message": str(path), "model": "llama-3-8b", "gpus": 8, **flags}
    found = check.run(check.Request(**asked))
    assert isinstance(found, Checked)
    return found


def zero(**keys: object) -> dict[str, Any]:
    return {**BASE, ZERO: {**BASE[ZERO], **keys}}


def ids(found: Checked) -> dict[str, str]:
    return {one.id: one.severity for one in found.findings}


def test_a_file_and_a_model_are_a_plan(tmp_path: Path) -> None:
    found = checked(tmp_path, BASE)
    assert found.plan is not None
    assert (found.plan.engine, found.plan.zero_stage, found.plan.mbs, found.plan.gbs) == ("deepspeed", 3, 4, 256)
    assert found.plan.precision == "bf16"
    assert found.settings is not None
    used = {one.key: one.flag for one in found.settings.used}
    assert used[f"{ZERO}.stage"] == "--zero 3"
    assert used[f"{ZERO}.reduce_bucket_size"] == "--reduce-bucket 500000000"
    assert found.settings.unused == ()


def test_the_screen_shows_what_was_used_and_what_was_not(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({**BASE, "steps_per_print": 10, "bfloat": 1}), encoding="utf-8")
    shown = run("check", str(path), "--model", "llama-3-8b", "--gpus", "8")
    assert shown.code == 0
    assert f"used of {path} (DeepSpeed JSON)" in shown.out
    assert "is of logs and measurements" in shown.out
    assert "is no key of DeepSpeed, which reads past it" in shown.out


def test_what_is_auto_is_filled_from_flags_as_a_trainer_does(tmp_path: Path) -> None:
    found = checked(tmp_path, AUTO, mbs=2, gbs=64, precision="bf16")
    assert found.plan is not None
    assert (found.plan.mbs, found.plan.gbs, found.plan.precision) == (2, 64, "bf16")
    assert found.plan.offload == ("optimizer",)
    assert found.settings is not None
    used = {one.key: one.flag for one in found.settings.used}
    # the hidden size squared
    assert used[f"{ZERO}.reduce_bucket_size"] == f"--reduce-bucket {4096 * 4096}"
    assert {one.key for one in found.settings.unused} >= {"fp16.initial_scale_power"}


def test_what_is_auto_and_no_flag_fills_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"--mbs; bf16.enabled and fp16.enabled: --precision"):
        checked(tmp_path, AUTO)


def test_a_flag_that_contradicts_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"train_micro_batch_size_per_gpu 4 is --mbs 4, and --mbs 2 is given"):
        checked(tmp_path, BASE, mbs=2)
    with pytest.raises(UsageError, match="--engine megatron is given"):
        checked(tmp_path, BASE, engine="megatron")
    assert checked(tmp_path, BASE, mbs=4, optimizer="adamw").exit_code == 0


@pytest.mark.parametrize(
    ("sizes", "gpus"),
    [
        # bigcode-project/starcoder#41: the launcher started one process
        ((256, 4, 8), 1),
        # OpenRLHF/OpenRLHF#346: 256 != 2 * 18 * 7
        ((256, 2, 18), 7),
        # deepspeedai/DeepSpeed#6914
        ((8, 2, 1), 2),
        # CASIA-LMC-Lab/AnomalyGPT#19
        ((16, 1, 8), 1),
    ],
)
def test_sizes_that_do_not_multiply_are_refused(tmp_path: Path, sizes: tuple[int, int, int], gpus: int) -> None:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    found = checked(tmp_path, {**BASE, **dict(zip(keys, sizes, strict=True))}, gpus=gpus)
    (one,) = [one for one in found.findings if one.id == "batch-identity"]
    assert one.severity == "refuse"
    assert found.exit_code == 5
    assert f"train_batch_size {sizes[0]} is not" in one.message
    assert str(sizes[1] * sizes[2] * gpus) in one.knob


def test_sizes_that_leave_one_out_follow_from_the_others(tmp_path: Path) -> None:
    left = {key: value for key, value in BASE.items() if key != "train_batch_size"}
    found = checked(tmp_path, left)
    assert found.plan is not None
    assert found.plan.gbs == 4 * 8 * 8
    # without --gpus they follow from all three
    found = checked(tmp_path, BASE, gpus=None)
    assert found.plan is not None
    assert found.plan.gpus == 8


@pytest.mark.parametrize(
    ("config", "rule", "severity"),
    [
        ({**BASE, "fp16": {"enabled": True}}, "ds-fp16-bf16-both", "refuse"),
        ({**BASE, "gradient_allreduce_op": "sum"}, "ds-gradient-allreduce-sum", "refuse"),
        # deepspeedai/DeepSpeed#1858 misspells it
        (zero(stage3_param_persist_threshold=1e8), "ds-unknown-key", "refuse"),
        (zero(zero_hpz_partition_size=8, offload_optimizer={"device": "cpu"}), "zeropp-with-offload", "warn"),
        (zero(stage=1, allgather_bucket_size=5e6), "ds-allgather-bucket-small", "advise"),
        ({**BASE, "bf16": {"enabled": False}, "fp16": {"enabled": True, "initial_scale_power": 32}}, "initial-scale",
         "warn"),
        (zero(offload_optimizer={"device": "cpu"}), "host-ram-unknown", "warn"),
    ],
)  # fmt: skip
def test_what_a_file_breaks_is_a_finding(tmp_path: Path, config: dict[str, Any], rule: str, severity: str) -> None:
    assert rule not in ids(checked(tmp_path, BASE))
    assert ids(checked(tmp_path, config))[rule] == severity


def test_a_misspelt_key_names_the_nearest(tmp_path: Path) -> None:
    found = checked(tmp_path, zero(stage3_param_persist_threshold=1e8))
    (one,) = [one for one in found.findings if one.id == "ds-unknown-key"]
    assert "nearest: stage3_param_persistence_threshold" in one.message


@pytest.mark.parametrize(
    ("config", "says"),
    [
        # hiyouga/LlamaFactory#1116
        ({**BASE, "gradient_accumulation_steps": "8"}, r'gradient_accumulation_steps is "8": write a whole number'),
        # hiyouga/LlamaFactory#3493
        ({**BASE, "bf16": {"enabled": "true"}}, r'bf16.enabled is "true": write true or false, without quotes'),
        ({**BASE, "bf16": True}, "bf16 is true: write keys in braces"),
        (zero(reduce_bucket_size=float("inf")), "reduce_bucket_size is Infinity: write a whole number"),
        (zero(stage=4), "zero_optimization.stage is 4: write 0, 1, 2 or 3"),
        # deepspeedai/DeepSpeed#3506
        (
            zero(offload_param={"device": "nvme", "buffer_count": 5, "buffer_size": 1e9}),
            r"\[nvme-buffers\].*offload_param.device is nvme.*9\.31 GiB of pinned host memory",
        ),
        (zero(offload_optimizer={"device": "disk"}), "write none or cpu or nvme"),
        (zero(offload_optimizer={"device": "cpu", "ratio": 0.3}), "ratio is 0.3"),
        (zero(mics_shard_size=8), "MiCS is not counted"),
        (zero(zenflow={"topk_ratio": 0.1}), "ZenFlow"),
        ({**BASE, "amp": {"enabled": True}}, "Apex"),
        ({**BASE, "elasticity": {"enabled": True}}, "batches that elasticity chooses"),
        ({**BASE, "data_types": {"grad_accum_dtype": "fp8"}}, "write fp32 or fp16 or bf16"),
    ],
)
def test_a_value_that_is_not_counted_or_of_another_kind_is_refused(
    tmp_path: Path, config: dict[str, Any], says: str
) -> None:
    with pytest.raises(BadInput, match=says):
        checked(tmp_path, config)


@pytest.mark.parametrize(("value", "said"), [(True, "on"), (False, "off")])
def test_overlap_is_a_flag_and_auto_is_the_trainers(tmp_path: Path, value: bool, said: str) -> None:
    found = checked(tmp_path, zero(stage=2, overlap_comm=value))
    assert found.plan is not None
    assert found.plan.overlap_comm == said
    assert found.settings is not None
    used = {one.key: one.flag for one in found.settings.used}
    assert used[f"{ZERO}.overlap_comm"] == f"--overlap-comm {said}"
    left = checked(tmp_path, zero(stage=2, overlap_comm="auto"))
    assert left.settings is not None
    assert f"{ZERO}.overlap_comm" in {one.key for one in left.settings.unused}


def test_older_spellings_are_the_same_keys(tmp_path: Path) -> None:
    new = zero(stage3_max_live_parameters=0, offload_optimizer={"device": "cpu"})
    old = zero(max_live_parameters=0, cpu_offload=True)
    old["bfloat16"] = old.pop("bf16")
    made = [checked(tmp_path, config) for config in (new, old)]
    assert made[0].plan == made[1].plan
    assert ids(made[0]) == ids(made[1])


def test_axes_of_the_file_are_degrees(tmp_path: Path) -> None:
    left = {key: value for key, value in BASE.items() if key != "train_batch_size"}
    found = checked(tmp_path, {**left, ZERO: {"stage": 1}, "tensor_parallel": {"autotp_size": 2}})
    assert found.plan is not None
    assert (found.plan.tp, found.plan.dp, found.plan.gbs) == (2, 4, 4 * 8 * 4)
    found = checked(tmp_path, {**left, "sequence_parallel_size": 2})
    assert found.plan is not None
    assert (found.plan.cp, found.plan.cp_comm) == (2, "all_to_all")


def test_without_a_model_the_knob_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(BASE), encoding="utf-8")
    with pytest.raises(UsageError, match="names no model; give --model"):
        check.run(check.Request(message=str(path)))
    shown = run("ledger", str(path))
    assert shown.code == 1
    assert f"trainledger check {path} --model MODEL" in shown.err


def test_a_file_that_is_no_settings_says_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"model_type": "llama"}', encoding="utf-8")
    with pytest.raises(BadInput, match="is a model's config; give it as --model"):
        check.run(check.Request(message=str(path), model="llama-3-8b"))
    path.write_text('{"stage": 3}', encoding="utf-8")
    with pytest.raises(BadInput, match="neither DeepSpeed's JSON, accelerate's YAML nor a PLAN file"):
        check.run(check.Request(message=str(path), model="llama-3-8b"))
    path.write_text('{"zero_optimization": {"stage": 3,}', encoding="utf-8")
    with pytest.raises(BadInput, match="not JSON"):
        check.run(check.Request(message=str(path), model="llama-3-8b"))


def test_the_json_has_both_lists(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({**BASE, "steps_per_print": 5}), encoding="utf-8")
    found = answer("check", str(path), "--model", "llama-3-8b", "--gpus", "8")["settings"]
    assert found["kind"] == "DeepSpeed JSON"
    assert {"key": "steps_per_print", "value": "5", "why": "is of logs and measurements"} in found["unused"]
    assert answer("check", "--model", "llama-3-8b", "--gpus", "8")["settings"] is None
