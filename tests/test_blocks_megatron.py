"""What layers of Megatron-Core keep, to the byte, where no measured peak says it alone."""

from __future__ import annotations

import msgspec

from trainledger.account.memory import stage_memory
from trainledger.facts.model import Block, Model, Ssm
from trainledger.facts.presets import load_preset
from trainledger.facts.workload import Workload
from trainledger.inventory.inventory import Inventory
from trainledger.plans.plan import Scenario, make_plans
from trainledger.plans.setting import make_setting

SEQ = 1024


def saved(model: Model, **words: object) -> int:
    """Bytes that wait for the backward as the last activation is saved."""
    scenario = msgspec.structs.replace(Scenario(engine="megatron", recompute="none"), **words)
    setting = make_setting(model, Workload(seq=SEQ), scenario)
    return int(stage_memory(Inventory(setting), make_plans({"zero_stage": 1})).saved[0, 0])


def of_one_layer(model: Model, block: Block, **words: object) -> int:
    """What one more layer of this kind saves."""
    one, two = (
        msgspec.structs.replace(
            model, blocks=(msgspec.structs.replace(block, layers=tuple(range(count))),), num_layers=count, mtp=None
        )
        for count in (1, 2)
    )
    return saved(two, **words) - saved(one, **words)


def mixer_of(model: Model) -> tuple[Block, Ssm]:
    return next((block, block.ssm) for block in model.blocks if block.ssm is not None)


def test_a_mixer_keeps_what_its_three_functions_read() -> None:
    # mamba_ssm at e9594ce1c7: the scan saves its input and its result before the gate, the norm over heads its input,
    # and the output projection its own: four tensors as wide as the heads together beside the projection
    model = load_preset("nemotron-h-56b")
    block, ssm = mixer_of(model)
    h, inner = model.hidden_size, ssm.heads * ssm.head_dim
    projection = 2 * inner + 2 * ssm.groups * ssm.state + ssm.heads
    per_token = 2 * (h + h) + 4 + 2 * projection + 3 * 2 * inner + 4 * ssm.groups
    assert of_one_layer(model, block) == SEQ * per_token


def test_scores_are_dropped_where_the_model_is_trained_with_dropout() -> None:
    # aten/src/ATen/native/Dropout.cpp: by a probability of 0 a tensor is handed on as it is
    for preset, each in (("gpt2", 2 + 1 + 2), ("qwen3-0.6b", 2)):
        model = load_preset(preset)
        block = model.blocks[0]
        assert block.attention is not None
        scores, log_sums = block.attention.heads * SEQ**2, block.attention.heads * SEQ
        eager, fused = of_one_layer(model, block, attention="eager"), of_one_layer(model, block)
        assert eager - fused == each * scores - 4 * log_sums


def test_dropout_that_is_said_is_what_runs() -> None:
    # the masks of GPT's blocks are gone, and a gated block has them: a byte an element, and scores dropped out beside
    for preset, said in (("gpt2", "off"), ("qwen3-0.6b", "on")):
        model = load_preset(preset)
        block = model.blocks[0]
        assert block.attention is not None
        less = of_one_layer(model, block, attention="eager", dropout="off")
        more = of_one_layer(model, block, attention="eager", dropout="on")
        scores, hidden = block.attention.heads * SEQ**2, SEQ * model.hidden_size
        assert more - less == (1 + 2) * scores + 2 * hidden
        assert of_one_layer(model, block, attention="eager", dropout=said) != of_one_layer(
            model, block, attention="eager"
        )
