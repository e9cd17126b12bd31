"""Messages of every wording, and the storages of a plan that a request is looked up in."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from trainledger.account.memory.answers.storages import storages
from trainledger.account.memory.answers.stored import Stored
from trainledger.adapters.out_of_memory import OutOfMemory, read_message
from trainledger.errors import BadInput, UnknownName
from trainledger.reconcile.out_of_memory import Explained, explain, full_of, granted
from trainledger.service import check
from trainledger.service.checked import Checked
from trainledger.service.common import prepared
from trainledger.service.requests import PlanRequest

MIB, GIB = 1 << 20, 1 << 30
OLD = "RuntimeError: CUDA out of memory. Tried to allocate {} (GPU 3; {}"
OF_2021 = (
    "15.75 GiB total capacity; 14.30 GiB already allocated; 12.88 MiB free; 14.42 GiB reserved in total by PyTorch"
)
OF_2023 = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 16.83 GiB. GPU 1 has a total capacty of 79.15 GiB"
    " of which 5.15 GiB is free. Process 77 has 2.00 GiB memory in use. Including non-PyTorch memory, this process has "
    "72.00 GiB memory in use. Of the allocated memory 60.00 GiB is allocated by PyTorch, and 9.50 GiB is reserved by "
    "PyTorch but unallocated. If reserved but unallocated memory is large try setting max_split_size_mb"
)


def test_the_figures_of_a_message_of_2021() -> None:
    found = read_message(OLD.format("20.00 MiB", OF_2021))
    assert (found.device, found.index) == ("cuda", 3)
    assert found.total == int(15.75 * GIB)
    assert found.free == int(12.88 * MIB)
    assert found.allocated == int(14.3 * GIB)
    assert found.unused == found.reserved - found.allocated  # type: ignore[operator]
    assert found.outside is None


def test_the_figures_of_a_message_of_2023() -> None:
    found = read_message(OF_2023)
    assert (found.device, found.index) == ("cuda", 1)
    assert (found.total, found.free) == (int(79.15 * GIB), int(5.15 * GIB))
    assert (found.allocated, found.unused, found.reserved) == (60 * GIB, int(9.5 * GIB), int(69.5 * GIB))
    assert (found.process, found.others) == (72 * GIB, 2 * GIB)
    assert found.outside == int(2.5 * GIB)
    parts = {part.what: part.amount / GIB for part in full_of(found)}
    assert list(parts.values()) == pytest.approx([60, 9.5, 2.5, 2, 5.15])
    # what is left of the card between them is not said of anybody
    assert sum(parts.values()) == pytest.approx(79.15)


def test_until_release_1_4_cached_is_what_tensors_had_left() -> None:
    figures = "10.92 GiB total capacity; 8.57 MiB already allocated; 9.28 GiB free; 4.68 MiB cached"
    found = read_message(OLD.format("12.50 MiB", figures))
    assert found.unused == int(4.68 * MIB)
    assert found.reserved == found.allocated + found.unused  # type: ignore[operator]


@pytest.mark.parametrize(
    ("text", "device", "nbytes"),
    [
        ("HIP out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 191.98 GiB", "hip", 4 * GIB),
        ("XPU out of memory. Tried to allocate 60.00 MiB (GPU 0; 15.91 GiB total capacity)", "xpu", 60 * MIB),
        ("MPS backend out of memory (MPS allocated: 17.00 GB). Tried to allocate 256.00 MB on pool", "mps", 256 * MIB),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 123 bytes. Error code 12", "cpu", 123),
        ("DefaultCPUAllocator: not enough memory: you tried to allocate 5077901088 bytes.", "cpu", 5077901088),
        ("MemoryError: Unable to allocate 1.00 MiB for an array with shape (1,)", "cpu", MIB),
        (
            "would exceed allowed memory. (out of memory)\nRequested    : 1.50 GiB\nDevice limit : 6 GiB",
            "cpu",
            3 * GIB // 2,
        ),
    ],
)
def test_other_devices_and_wordings(text: str, device: str, nbytes: int) -> None:
    found = read_message(text)
    assert found.device == device
    assert found.requested[0].at_least <= nbytes <= found.requested[0].at_most


def test_colours_and_broken_lines_within_a_message_are_passed_over() -> None:
    red = "\x1b[31mCUDA out of memory.\x1b[0m Tried to\n   allocate \x1b[1;36m15.66\x1b[0m GiB. GPU 3"
    rest = (
        "has a total capacity of \x1b[1;36m79.15\x1b[0m GiB\n[rank1]: CUDA out of memory. Tried to allocate 7.83 GiB."
    )
    found = read_message(f"{red} {rest}")
    assert (found.requested[0].text, found.index, found.total) == ("15.66 GiB", 3, int(79.15 * GIB))
    assert "\x1b" not in found.text


def test_a_request_of_nothing_is_of_no_tensor() -> None:
    with pytest.raises(BadInput, match=r"asks for 0 bytes, which no tensor has.*nvidia-smi"):
        read_message(OLD.format("0 bytes", "0 bytes total capacity"))


def test_a_plan_is_told_from_a_message_though_its_path_has_spaces(tmp_path: Path) -> None:
    plan = tmp_path / "my plan.toml"
    plan.write_text('model = "llama-3-8b"\ngpus = 8\nzero = 3\n')
    assert isinstance(check.run(check.Request(message=str(plan))), Checked)


def test_a_log_of_powershell_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    for codec in ("utf-16", "utf-8"):
        log.write_text("Tried to allocate 1.00 GiB\n", encoding=codec)
        answer = check.run(check.Request(message=str(log), model="llama-3-8b", gpus=8))
        assert isinstance(answer, check.Response)
        assert answer.message.requested == "1.00 GiB"


def test_a_table_of_figures_is_one_message() -> None:
    text = (
        "torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)\n"
        "Currently allocated     : 4.16 GiB\nRequested               : 1.50 GiB\nDevice limit            : 6.00 GiB\n"
        "Free (according to CUDA): 0 bytes\n"
    )
    found = read_message(f"CUDA driver 12\n{text}")
    assert (found.index, found.allocated, found.total, found.free) == (0, int(4.16 * GIB), 6 * GIB, 0)


def test_the_first_message_of_a_log_counts_and_what_led_to_it_is_kept() -> None:
    log = (
        "step 1\nTraceback (most recent call last):\n  old\nTraceback (most recent call last):\n  logits = lm_head(x)\n"
        f"{OF_2023}\n\nstep 2\n{OLD.format('1.00 GiB', OF_2021)}"
    )
    found = read_message(log)
    assert found.requested[0].text == "16.83 GiB"
    assert found.before == "Traceback (most recent call last):\n  logits = lm_head(x)\n"
    assert found.total == int(79.15 * GIB)
    assert found.text.endswith("reserved by PyTorch but unallocated.")


@pytest.mark.parametrize(
    ("text", "least", "most"),
    [
        ("6.28 GiB", 6.275 * GIB, 6.285 * GIB),
        ("786.00 MiB", 785.995 * MIB, 786.005 * MIB),
        # digits that a person left out may be cut or rounded, and whose GB are 1e9
        ("49 GiB", 48 * GIB, 50 * GIB),
    ],
)
def test_a_print_stands_for_all_that_rounds_to_it(text: str, least: float, most: float) -> None:
    span = read_message(f"CUDA out of memory. Tried to allocate {text}").requested[0]
    assert (span.at_least, span.at_most) == (math.floor(least), math.ceil(round(most, 3)))


def test_a_gigabyte_is_read_both_ways() -> None:
    binary, decimal = read_message("CUDA out of memory. Tried to allocate 2.00 GB").requested
    assert binary.at_least < 2 * GIB < binary.at_most
    assert decimal.at_least < 2 * 10**9 < decimal.at_most


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("RuntimeError: CUDA error: out of memory", "not how much was asked for"),
        ("Killed", "no out-of-memory message"),
        ("Tried to allocate more than 1EB memory.", "no out-of-memory message"),
    ],
)
def test_a_text_without_a_size_is_refused(text: str, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        read_message(text)


def plan(**flags: object) -> tuple[tuple[Stored, ...], dict[str, int]]:
    run, plans, inventory = prepared(msgspec.convert(flags, PlanRequest))
    row = plans.row(0)
    tokens = int(plans.tokens(run.setting.workload.seq)[0])
    return storages(inventory, plans), {
        "tokens": tokens,
        "mbs": row["mbs"],
        "cp": row["cp"],
        "seq": run.setting.workload.seq,
    }


def asked(nbytes: float, before: str = "", *, device: str = "CUDA") -> OutOfMemory:
    return read_message(f"{before}\n{device} out of memory. Tried to allocate {nbytes / GIB:.2f} GiB.")


def told(message: OutOfMemory, named: str = "", **flags: object) -> Explained:
    found, sizes = plan(**flags)
    return explain(
        message,
        found,
        tensor=named,
        tokens=sizes["tokens"],
        mbs=sizes["mbs"],
        cp=sizes["cp"],
        seq=sizes["seq"],
    )


def test_what_the_allocator_asks_the_device_for() -> None:
    assert granted(10 * MIB + 1) == 12 * MIB
    assert granted(10 * MIB) == 10 * MIB
    assert granted(10 * MIB - 1) == granted(10 * MIB)
    assert granted(9 * MIB) == 20 * MIB
    assert granted(512 * 1024) == 2 * MIB


@pytest.mark.parametrize("engine", ["paper", "pytorch", "megatron", "deepspeed", "torchtitan", "nanotron"])
@pytest.mark.parametrize(("width", "dtype"), [(2, "bf16"), (4, "fp32")])
def test_logits_are_found_in_each_dtype_whatever_the_engine(engine: str, width: int, dtype: str) -> None:
    size = 3 * 4096 * 128256 * width
    found = told(asked(size), model="llama-3-8b", engine=engine, mbs=3, gpus=2).candidates
    found = tuple(one for one in found if one.family == "logits")
    assert found[0].family == "logits"
    assert found[0].amount == size
    assert f"128256 vocabulary x {width} B" in found[0].formula
    assert found[0].phase.startswith("forward")
    assert any("--mbs" in one.knob for one in found)


def test_a_flat_shard_is_found_with_its_phase_and_what_makes_it_smaller() -> None:
    found = told(asked(6_738_415_616 * 4 / 4), model="llama-2-7b", engine="deepspeed", zero=2, gpus=4).candidates
    assert (found[0].name, found[0].family, found[0].also) == ("master", "optimizer", 2)
    assert "optimizer" in found[0].phase
    assert "--offload optimizer" in found[0].knob


def test_a_sub_group_of_zero_3_is_found() -> None:
    found = told(asked(4e9), model="llama-2-70b", engine="deepspeed", zero=3, gpus=8).candidates
    assert "a sub-group of ZeRO-3 in fp32" in {one.name for one in found}
    assert not told(asked(4e9), model="llama-2-70b", engine="deepspeed", zero=2, gpus=8).candidates


def test_a_bucket_a_gathered_unit_a_gradient_and_a_whole_copy_are_found() -> None:
    bucket = told(asked(5e8 * 2), model="llama-2-7b", engine="deepspeed", zero=2, gpus=4).candidates
    assert "--reduce-bucket" in {one.knob for one in bucket}
    layer = 218_112_000
    gathered = told(asked(layer * 4), model="llama-3-8b", engine="pytorch", zero=3, gpus=8).candidates
    assert any(one.family == "gathered" and f"{layer} parameters" in one.formula for one in gathered)
    head = told(asked(128256 * 4096 * 2), model="llama-3-8b", engine="pytorch", zero=3, gpus=8).candidates
    assert any(one.name.endswith("weight, whole, in bf16") and one.also == 1 for one in head)
    whole = told(asked(8_030_261_248 * 2), model="llama-3-8b", engine="pytorch", zero=3, gpus=8).candidates
    assert "the whole model in bf16" in {one.name for one in whole}
    assert not whole[0].in_plan


def test_what_engines_gather_and_stand_in_for_gradients_is_found() -> None:
    ends = 2 * 128256 * 4096 + 4096
    joined = told(asked(ends * 4), model="llama-3-8b", engine="torchtitan", zero=3, gpus=8).candidates
    assert any(one.name.startswith("weights or gradients of both ends") and one.in_plan for one in joined)
    share = told(asked(218_112_000 * 4 / 4), model="llama-3-8b", engine="torchtitan", zero=3, gpus=4).candidates
    assert any(one.name == "one of 4 shards of a layer, in fp32" for one in share)
    dummy = told(asked(2 * 14336 * 4096 * 2), model="llama-3-8b", engine="megatron", zero=1, gpus=4).candidates
    assert any(one.name == "dummy gradient of 28672 x 4096" and one.in_plan for one in dummy)


def test_scores_that_the_plan_does_not_make_say_what_would_make_them() -> None:
    found = told(asked(2 * 32 * 4096**2 * 2), model="llama-3-8b", engine="pytorch", mbs=2).candidates
    assert [(one.family, one.in_plan) for one in found] == [("scores", False)]
    assert "--attention flash" in found[0].knob
    eager = told(asked(2 * 32 * 4096**2 * 2), model="llama-3-8b", engine="paper", attention="eager", mbs=2).candidates
    assert eager[0].in_plan


def test_storages_name_the_pipeline_stages_that_make_them() -> None:
    found, _ = plan(model="llama-3-8b", engine="megatron", gpus=4, pp=4, gbs=8)
    by_family = {one.family: one.pp_stages for one in found if one.name.startswith(("logits", "the whole"))}
    assert by_family["logits"] == (3,)
    assert len(by_family["copies"]) > 1


def test_of_many_that_match_those_that_the_traceback_speaks_of_come_first() -> None:
    """A gradient of the output layer is as large as logits of 4096 tokens."""
    size = 128256 * 4096 * 2
    plain = told(asked(size), model="llama-3-8b", engine="pytorch", zero=3, gpus=8)
    said = told(asked(size, "logits = self.lm_head(hidden)"), model="llama-3-8b", engine="pytorch", zero=3, gpus=8)
    assert {"logits", "gradients"} <= {one.family for one in plain.candidates}
    assert said.candidates[0].family == "logits"
    assert (plain.named, said.named) == ("", "logits")


def test_of_many_that_match_those_of_the_part_of_the_step_that_ran_come_first() -> None:
    """Lightning-AI/litgpt#684: 64,000 words of 4096 and logits of 4096 tokens are as large, and so are gradients."""
    size = 64000 * 4096 * 4
    flags: dict[str, Any] = {"model": "mistral-7b-v0.1", "set": ("vocab_size=64000",), "engine": "pytorch", "gpus": 8}
    for words, phase in (
        ("Variable._execution_engine.run_backward(", "backward"),
        ("return forward_call(*args, **kwargs)", "forward"),
    ):
        first = told(asked(size, words), **flags, zero=3).candidates[0]
        assert first.phase.startswith(phase)


def test_a_tensor_that_is_named_and_has_another_size_is_inverted() -> None:
    found = told(asked(2.5 * 4096 * 128256 * 4), "logits", model="llama-3-8b", engine="pytorch")
    assert found.candidates == ()
    wide = next(one for one in found.inversions if one.per_token == 128256 * 4)
    assert wide.tokens_at_least <= 2.5 * 4096 <= wide.tokens_at_most
    assert wide.mbs == pytest.approx(2.5, rel=0.01)
    assert wide.seq == pytest.approx(2.5 * 4096, rel=0.01)
    assert wide.vocabulary == pytest.approx(2.5 * 128256, rel=0.01)


def test_context_parallel_ranks_share_the_length_that_is_told() -> None:
    flags: dict[str, Any] = {"model": "llama-3-8b", "engine": "pytorch", "gpus": 4, "cp": 4, "zero": 3}
    found = told(asked(2 * 1024 * 128256 * 4), "logits in fp32", **flags).inversions[0]
    assert (found.planned_tokens, found.mbs) == (1024, pytest.approx(2, rel=0.01))
    assert found.seq == pytest.approx(2 * 4096, rel=0.01)


def test_without_a_match_the_nearest_is_told() -> None:
    found = told(asked(55 * GIB), model="llama-3-8b", engine="pytorch")
    assert found.candidates == ()
    assert 1 <= len(found.nearest) <= 3
    assert all(abs(one.off) < 1 for one in found.nearest)


def test_what_lies_in_host_memory_answers_a_message_of_the_host() -> None:
    flags: dict[str, Any] = {"model": "llama-2-7b", "engine": "deepspeed", "zero": 2, "gpus": 4}
    message = read_message(f"DefaultCPUAllocator: can't allocate memory: you tried to allocate {6738415616} bytes.")
    assert message.device == "cpu"
    first = told(message, **flags, offload=("optimizer",)).candidates[0]
    assert (first.place, first.family) == ("host", "optimizer")


def test_an_unknown_tensor_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"--tensor.*nearest: logits"):
        told(asked(GIB), "logit5", model="llama-3-8b")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        # https://github.com/NVIDIA/nccl/issues/964
        (
            "ncclUnhandledCudaError: ... Last error: Cuda failure 2 'out of memory'",
            ("NCCL's", "--reserve", "nccl-memory"),
        ),
        ("NCCL WARN Failed to CUDA calloc async 608 bytes, out of memory", ("NCCL's", "smaller --mbs")),
        # https://github.com/Lightning-AI/litgpt/blob/4839345a/tutorials/resource-tables.md: 70B in nf4 on 40 GB
        ("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", ("cuBLAS's", "--reserve")),
        # https://github.com/deepspeedai/DeepSpeed/issues/4571
        ("Killing subprocess 3921 ... exits with return code = -9", ("killed", "host", "--cluster", "host-memory")),
        ("failed (exitcode: -9) local_rank: 1 (pid: 34)", ("killed", "host-memory")),
        ("Signal 9 (SIGKILL) received by PID 12345", ("killed", "host-memory")),
    ],
)
def test_what_ran_out_beside_the_allocator_is_told_apart(text: str, words: tuple[str, ...]) -> None:
    with pytest.raises(BadInput) as error:
        read_message(text)
    assert all(word in str(error.value) for word in words)


def test_a_size_is_read_before_the_end_that_it_led_to() -> None:
    log = "CUDA out of memory. Tried to allocate 2.00 GiB\nSignal 9 (SIGKILL) received by PID 1"
    assert read_message(log).requested[0].middle == 2**31
