"""`check`: a message, a log or a PLAN file in, the tensors that it can have been out."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from command_line import answer, check_golden, run

GIB = 1 << 30
LOGITS = 4 * 4096 * 128256 * 4
"""Of 4 sequences of 4096 tokens over Llama 3's vocabulary, in fp32."""
MESSAGE = (
    f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {LOGITS / GIB:.2f} GiB. GPU 0 has a total capacity "
    "of 79.15 GiB of which 1.15 GiB is free. Including non-PyTorch memory, this process has 78.00 GiB memory in use. "
    "Of the allocated memory 66.00 GiB is allocated by PyTorch, and 9.00 GiB is reserved by PyTorch but unallocated."
)
PLAN = ("--model", "llama-3-8b", "--engine", "pytorch", "--gpus", "8", "--zero", "3", "--mbs", "4", "--gpu", "h100")


def test_a_request_that_is_explained_ends_with_5_and_its_tensor_first() -> None:
    found = answer("check", MESSAGE, *PLAN, code=5)
    first = found["candidates"][0]
    assert (first["family"], first["amount"], first["pp_stages"]) == ("logits", LOGITS, [0])
    assert found["message"]["at_least"] <= LOGITS <= found["message"]["at_most"]
    assert found["message"]["allocated_bytes"] == 66 * GIB
    assert found["full_of"][0]["what"] == "tensors"
    done = run("check", MESSAGE, *PLAN)
    assert done.code == 5
    verdict = done.out.splitlines()[0]
    assert verdict.startswith("7.83 GiB asked for: ")
    assert first["name"] in verdict
    assert "smaller logits: --mbs" in done.out


def test_what_memory_was_full_of_is_told_beside_what_the_plan_holds() -> None:
    found = answer("check", MESSAGE, *PLAN, code=5)
    assert found["moment"]["place"]
    assert found["peak"]["allocated_bytes"] >= max(one["amount"] for one in found["peak"]["alive"])
    assert {note["rule"] for note in found["notes"]} >= {"fragmentation", "nccl-memory"}


def test_the_first_message_of_a_log_is_read_from_its_file(tmp_path: Path) -> None:
    log = tmp_path / "rank 0.log"
    log.write_text(f"epoch 1\n{MESSAGE}\nepoch 2\nCUDA out of memory. Tried to allocate 1.00 GiB\n", encoding="utf-8")
    assert answer("check", str(log), *PLAN, code=5)["message"]["requested"] == "7.83 GiB"


def test_a_plan_file_stands_for_the_model(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text('model = "llama-3-8b"\nengine = "pytorch"\ngpus = 8\nzero = 3\nmbs = 4\n', encoding="utf-8")
    assert answer("check", MESSAGE, "--model", str(plan), code=5)["plan"]["mbs"] == 4


def test_nothing_of_that_size_is_said_with_the_nearest() -> None:
    found = answer("check", "CUDA out of memory. Tried to allocate 60.00 GiB", *PLAN)
    assert found["candidates"] == []
    assert found["nearest"]
    assert run("check", "CUDA out of memory. Tried to allocate 60.00 GiB", *PLAN).out.startswith(
        "60.00 GiB asked for: nothing that this plan makes has that size\n"
    )


def test_whole_sequences_that_have_the_size_are_named_first() -> None:
    """65,536 tokens x 128,256 words x 4 B are 31.31 GiB: sixteen sequences of 4096 tokens, not the plan's four."""
    text = run("check", "CUDA out of memory. Tried to allocate 31.31 GiB", *PLAN).out
    assert text.splitlines()[0].startswith(
        "31.31 GiB asked for: nothing that this plan makes has that size, but logits in fp32 at --mbs 16"
    )
    assert "smaller logits: --mbs or --seq" in text


def test_a_named_tensor_of_another_size_says_what_gives_it() -> None:
    message = "    logits = logits.float()\nCUDA out of memory. Tried to allocate 49.00 GiB."
    for extra in ((), ("--tensor", "logits")):
        found = answer("check", message, *PLAN, *extra, code=5)
        assert found["named"] == "logits"
        tokens = [round(49 * GIB / (128256 * width)) for width in (2, 4)]
        found = {one["per_token"]: one for one in found["inversions"]}
        for width, count in zip((2, 4), tokens, strict=True):
            made = found[128256 * width]
            assert made["tokens_at_least"] <= count <= made["tokens_at_most"]


def test_a_message_is_read_from_a_pipe(tmp_path: Path) -> None:
    """As a shell makes one of `<(tail log)`."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(MESSAGE,))
    writer.start()
    done = run("check", str(pipe), "--model", "gpt2")
    writer.join()
    assert (done.code in {0, 5}, "asked for" in done.out) == (True, True)


@pytest.mark.parametrize(
    ("code", "arguments", "holds"),
    [
        (1, ("CUDA error: out of memory", "--model", "gpt2"), ("not how much was asked for", "Tried to allocate")),
        (1, ("hello there", "--model", "gpt2"), ("'hello there'", "holds no out-of-memory message")),
        (1, ("nowhere.log", "--model", "gpt2"), ("nowhere.log", "no such file")),
        (1, ("/", "--model", "gpt2"), ("/ cannot be read (Is a directory)",)),
        (1, ("/dev/null", "--model", "gpt2"), ("/dev/null is empty",)),
        (1, ("", "--model", "gpt2"), ("MESSAGE is empty",)),
        (2, (MESSAGE,), ("no model",)),
        (2, (), ("PLAN.toml", "MESSAGE")),
        (1, (MESSAGE, "--model", "gpt2", "--tensor", "logitz"), ("'logitz'", "--tensor", "logits")),
        (1, (MESSAGE, "--model", "gpt2", "--tp", "5", "--gpus", "5"), ("[heads-divisible-by-tp]",)),
    ],
)
def test_what_cannot_be_explained_is_refused(code: int, arguments: tuple[str, ...], holds: tuple[str, ...]) -> None:
    done = run("check", *arguments)
    assert (done.code, done.out) == (code, ""), done
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    for text in holds:
        assert text in done.err


def test_a_parameter_count_has_states_to_look_in() -> None:
    message = "CUDA out of memory. Tried to allocate 26.08 GiB"
    found = answer("check", message, "--model", "7B", "--engine", "deepspeed", code=5)
    assert {one["family"] for one in found["candidates"]} >= {"optimizer", "copies"}


def test_the_keys_of_the_answer_are_frozen() -> None:
    """A later version may add keys, and takes none away."""
    explained = answer("check", MESSAGE, *PLAN, code=5)
    inverted = answer("check", MESSAGE, *PLAN, "--tensor", "attention scores in fp32", code=5)
    own = {key: value for key, value in explained.items() if key not in ("profile", "plan", "assumed", "notes")}
    shapes = {
        **{key: sorted(value) for key, value in own.items() if isinstance(value, dict)},
        **{key: sorted(value[0]) for key, value in own.items() if isinstance(value, list) and value},
        "inversions": sorted(inverted["inversions"][0]),
    }
    check_golden("check_keys.json", json.dumps({"keys": list(explained), **shapes}, indent=1) + "\n")
