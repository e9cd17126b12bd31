"""Logs with several messages, and messages of programs beside PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import answer, run
from trainledger.adapters.out_of_memory import read_log, read_message
from trainledger.errors import BadInput
from trainledger.service import check

MIB, GIB = 1 << 20, 1 << 30
SHORT = "[rank{}]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {}. GPU {} has a total capacity of {}"
LOG = "\n".join(
    (
        "step 1",
        SHORT.format(0, "15.66 GiB", 0, "79.15 GiB"),
        SHORT.format(1, "15.66 GiB", 1, "79.15 GiB"),
        SHORT.format(2, "7.83 GiB", 2, "39.39 GiB"),
        SHORT.format(3, "15.66 GiB", 3, "79.15 GiB"),
        SHORT.format(4, "7.83 GiB", 4, "39.39 GiB"),
        SHORT.format(5, "55.00 GiB", 5, "79.15 GiB"),
    )
)
FLAGS = ("--model", "llama-3-8b", "--gpus", "8", "--engine", "pytorch", "--zero", "3", "--mbs", "8")


def test_each_size_of_a_log_is_answered_and_the_others_are_counted() -> None:
    found = read_log(LOG)
    assert (found.first.requested[0].text, found.repeats) == ("15.66 GiB", 2)
    further = [(one.message.requested[0].text, one.times, one.message.index) for one in found.further]
    assert further == [("7.83 GiB", 2, 2), ("55.00 GiB", 1, 5)]
    # each has the capacities of its own line
    assert found.further[0].message.total == int(39.39 * GIB)


def test_the_answer_names_what_each_further_size_is(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(LOG, encoding="utf-8")
    found = answer("check", str(log), *FLAGS, code=5)
    assert found["repeats"] == 2
    first, second = found["others"]
    assert (first["requested"], first["times"], first["index"]) == ("7.83 GiB", 2, 2)
    assert first["candidate"]["family"] == "logits"
    assert second["candidate"] is None
    shown = run("check", str(log), *FLAGS).out
    assert "further messages ask for" in shown
    assert "nothing that this plan makes has that size" in shown
    assert "2 more messages ask for 15.66 GiB" in shown


def test_a_log_of_one_message_says_nothing_of_others() -> None:
    assert "more message" not in run("check", SHORT.format(0, "15.66 GiB", 0, "79.15 GiB"), *FLAGS).out


def test_the_share_that_the_plan_makes_is_told_before_what_it_does_not() -> None:
    """THUDM/slime#1951: of a vocabulary that two ranks cut, 58.15 GiB are twice as many tokens as of a whole one."""
    message = "compute_log_probs(logits.clone(), ...) CUDA out of memory. Tried to allocate 58.15 GiB."
    found = check.run(check.Request(message=message, model="qwen3-4b", tp=2, gpus=8, engine="megatron"))
    assert isinstance(found, check.Response)
    made = found.inversions[0]
    assert made.per_token == 152064 // 2 * 4
    assert made.tokens_at_least <= 58.15 * GIB / made.per_token <= made.tokens_at_most


@pytest.mark.parametrize(
    ("text", "device", "nbytes"),
    [
        # google-deepmind/jaxline#11
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 285212672 bytes.", "xla", 285212672),
        # jax-ml/jax#788
        ("Resource exhausted: Out \nof memory while trying to allocate 5520758552 bytes.", "xla", 5520758552),
        # onpix/LLNeRF#9
        (
            "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating 20029400304 bytes.",
            "xla",
            20029400304,
        ),
        ("XlaRuntimeError: RESOURCE_EXHAUSTED: Attempting to allocate 2.11G. That was not possible.", "xla",
         int(2.11 * GIB)),
        # keras-team/keras#13889
        ("failed to allocate 890.06M (933298432 bytes) from device: HIP_ERROR_OutOfMemory", "hip", 933298432),
        ("OOM when allocating tensor with shape[8,512,50257] and type float on /job:x", "cpu", 8 * 512 * 50257 * 4),
        ("cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 1,024,000 bytes (allocated so far: 2 bytes).",
         "cuda", 1024000),
        # tenstorrent/tt-xla#1650
        ("Out of Memory: Not enough space to allocate 204800000 B DRAM buffer across 12 banks", "cpu", 204800000),
        ("ggml: allocating 12345.00 MiB on device 0: cudaMalloc failed: out of memory", "cuda", 12345 * MIB),
    ],
)  # fmt: skip
def test_messages_beside_pytorch_that_state_a_size_are_read(text: str, device: str, nbytes: int) -> None:
    found = read_message(text)
    assert found.device == device
    assert found.requested[0].at_least <= nbytes <= found.requested[0].at_most


def test_the_figures_of_a_message_of_another_vendor() -> None:
    """modelscope/ms-swift#9403."""
    found = read_message(
        "RuntimeError: NPU out of memory. Tried to allocate 26.44 GiB (NPU 2; 60.96 GiB total capacity; 30.23 GiB "
        "already allocated; 30.23 GiB current active; 25.36 GiB free; 33.08 GiB reserved in total by PyTorch)"
    )
    assert (found.device, found.index) == ("npu", 2)
    assert (found.total, found.free) == (int(60.96 * GIB), int(25.36 * GIB))
    assert (found.allocated, found.reserved) == (int(30.23 * GIB), int(33.08 * GIB))


def test_xla_asks_for_what_a_tensor_takes() -> None:
    """One byte more than PyTorch would round up to is another tensor."""
    exact = 4096 * 128256 * 4
    message = f"RESOURCE_EXHAUSTED: Out of memory while trying to allocate {exact} bytes."
    found = check.run(check.Request(message=message, model="llama-3-8b", engine="pytorch", zero=0))
    assert isinstance(found, check.Response)
    assert found.candidates[0].amount == exact
    more = check.run(
        check.Request(message=message.replace(str(exact), str(exact + 1)), model="llama-3-8b", engine="pytorch", zero=0)
    )
    assert isinstance(more, check.Response)
    assert more.candidates == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        # vllm-project/vllm#2248
        ("ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
         ("serves a model", "gpu_memory_utilization", "--reserve")),
        ("16.00 GiB KV cache is needed, which is larger than the available KV cache memory (3.50 GiB)",
         ("serves a model",)),
        # young-geng/EasyLM#98
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 19.99G of 15.48G hbm.",
         ("compiled program as a whole", "trainledger ledger")),
        ("RuntimeError: unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)",
         ("DataLoader", "--shm-size")),
        # huggingface/transformers#24658
        ("get_accelerator().pin_memory(\n  RuntimeError: CUDA error: out of memory", ("page-locked", "pin_memory")),
        ("UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY", ("not how much was asked for",)),
        ("RESOURCE_EXHAUSTED", ("not how much was asked for",)),
        ("cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/generic/THCStorage.cu:58",
         ("not how much was asked for",)),
    ],
)  # fmt: skip
def test_messages_that_state_no_request_are_refused_by_name(text: str, words: tuple[str, ...]) -> None:
    with pytest.raises(BadInput) as error:
        read_message(text)
    assert all(word in str(error.value) for word in words)
