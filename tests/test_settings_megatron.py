"""Commands of Megatron: sizes that agree with a named model, and arguments that change what is held."""

from __future__ import annotations

from typing import Any

import pytest

from trainledger.errors import BadInput
from trainledger.service import check
from trainledger.service.checked import Checked

LLAMA_8B = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8 "
    "--ffn-hidden-size 14336 --vocab-size 128256 --untie-embeddings-and-output-weights --swiglu"
)


def checked(words: str, **flags: object) -> Checked:
    command = f"pretrain_gpt.py --tensor-model-parallel-size 1 --bf16 {words}"
    given: dict[str, Any] = {"model": "llama-3-8b", "gpus": 8, **flags}
    found = check.run(check.Request(message=command, **given))
    assert isinstance(found, Checked)
    return found


def test_sizes_that_a_named_model_has_are_used() -> None:
    found = checked(LLAMA_8B)
    assert found.settings is not None
    assert {one.key for one in found.settings.used} >= {"--num-layers", "--num-query-groups", "--vocab-size"}
    unused = {one.key for one in found.settings.unused}
    assert not unused & {"--num-layers", "--hidden-size", "--group-query-attention"}


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("--num-layers 32", "--num-layers 40", "--num-layers 40, and llama-3-8b has 32"),
        ("--hidden-size 4096", "--hidden-size 5120", "--hidden-size 5120, and llama-3-8b has 4096"),
        ("--num-query-groups 8", "--num-query-groups 4", "--num-query-groups 4, and llama-3-8b has 8"),
        ("--group-query-attention", "", "--num-attention-heads 32, and llama-3-8b has 8"),
        ("--ffn-hidden-size 14336", "--ffn-hidden-size 11008", "llama-3-8b has 14336"),
        ("--untie-embeddings-and-output-weights", "", "llama-3-8b does not tie its embeddings"),
    ],
)
def test_another_model_than_the_named_one_is_refused(before: str, after: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        checked(LLAMA_8B.replace(before, after))


def test_experts_are_of_the_model_or_of_neither() -> None:
    with pytest.raises(BadInput, match="with --num-experts, and llama-3-8b has no experts"):
        checked(f"{LLAMA_8B} --num-experts 8")
    mixtral = LLAMA_8B.replace("--vocab-size 128256", "--vocab-size 32000")
    with pytest.raises(BadInput, match="without --num-experts, and mixtral-8x7b has experts"):
        checked(mixtral, model="mixtral-8x7b")
    assert checked(f"{mixtral} --num-experts 8", model="mixtral-8x7b").model == "mixtral-8x7b"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--fp8-param-gather", "the dtype that weights are kept in"),
        ("--fine-grained-activation-offloading", "which activations wait in host memory"),
        ("--defer-embedding-wgrad-compute", "gradients of the output layer"),
        ("--deepspeed --zero-stage 1", "the engine, to DeepSpeed inside Megatron"),
        ("--mtp-num-layers 1", "layers that predict further tokens"),
        ("--num-layers-per-virtual-pipeline-stage 2", "says no number of stages; give --num-layers"),
        ("--transformer-impl local", "the account is of transformer_engine"),
        ("--decoder-first-pipeline-num-layers 3", "say so by --pp-layout"),
        ("--attention-dropout 0", "one of --attention-dropout and --hidden-dropout"),
        ("--attention-dropout half", "write a share, such as 0.1"),
        ("--cp-comm-type a2a+p2p", "which is not counted; write p2p"),
        ("--use-precision-aware-optimizer --main-grads-dtype bf16", "--main-grads-dtype bf16 is not counted"),
        ("--use-precision-aware-optimizer --exp-avg-dtype bf16", "moments in bf16 and fp32 are not counted"),
        ("--optimizer-cpu-offload --optimizer-offload-fraction 0.5", "leaves a part of the optimizer on the card"),
    ],
)
def test_what_is_held_otherwise_and_not_counted_is_refused(words: str, said: str) -> None:
    with pytest.raises(BadInput) as refused:
        checked(f"{words} --use-distributed-optimizer")
    assert said in str(refused.value)


def test_a_model_made_from_sizes_has_an_output_layer_of_its_own() -> None:
    assert checked(LLAMA_8B, model=None).model == "custom"
    with pytest.raises(BadInput, match="the output layer is the embedding"):
        checked(LLAMA_8B.replace("--untie-embeddings-and-output-weights", ""), model=None)


def test_a_layout_may_be_said_by_the_plan_instead() -> None:
    words = "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 14"
    found = checked(words, pp_layout=(14, 18))
    assert found.plan is not None
    assert found.plan.pp == 2


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        ("--num-distributed-optimizer-instances 2 --use-distributed-optimizer", "dp_replicate", 2),
        ("--use-precision-aware-optimizer --use-distributed-optimizer", "optimizer", "adamw-remainder"),
        (
            "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --use-distributed-optimizer",
            "optimizer",
            "adamw-bf16",
        ),
        ("--context-parallel-size 2 --cp-comm-type a2a", "cp", 2),
        ("--cuda-graph-impl none", "tp", 1),
        ("--attention-dropout 0.0 --hidden-dropout 0.0", "dropout", "off"),
        ("--attention-dropout 0.1", "dropout", "on"),
    ],
)
def test_arguments_with_a_flag_of_another_name_are_flags(words: str, field: str, value: object) -> None:
    assert getattr(checked(words).plan, field) == value
