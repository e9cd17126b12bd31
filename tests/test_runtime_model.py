"""What a decoder must do whatever its weights are; that its numbers are right is scripts/model_oracle.py's to say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from model_cases import CASES, LENGTH, decoder_of, facts, tokens_of
from trainledger.errors import BadInput, Refused
from trainledger.facts.families import family_of, model_from_config, model_types
from trainledger.facts.families.keys import names
from trainledger.facts.model import Model
from trainledger.facts.presets import preset_config, preset_names
from trainledger.facts.semantics import AttentionRule, MoeRule
from trainledger.runtime.model import Decoder, build_decoder, init_weights
from trainledger.runtime.model.context import Context
from trainledger.runtime.model.moe import Moe
from trainledger.runtime.model.read import READERS, read_semantics
from trainledger.runtime.model.router import route

every_case = pytest.mark.parametrize("case", CASES)
LAST = LENGTH - 1


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Sums in one order, and no threads that fight over two cores."""
    torch.set_num_threads(1)


def names_and_shapes(model: Model) -> set[tuple[str, tuple[int, ...]]]:
    """Every tensor of the ledger under its full name, experts as one stack with `*` for their index."""
    found = {(tensor.name, tensor.shape) for tensor in (*model.embedding, *model.final)}
    for block in model.blocks:
        for layer in block.layers:
            for tensor in block.tensors:
                name = model.layer_prefix.format(i=layer) + tensor.name.replace("{e}", "*")
                found.add((name, (tensor.copies, *tensor.shape) if tensor.copies > 1 else tensor.shape))
    return found


def parameters_of(decoder: Decoder) -> set[tuple[str, tuple[int, ...]]]:
    """Names and shapes of what a decoder would train."""
    return {(name, tuple(parameter.shape)) for name, parameter in decoder.named_parameters()}


def kinds(case: str) -> list[int]:
    """The first layer of each kind of attention."""
    rules = read_semantics(facts(case), CASES[case]).attention
    return [layer for layer, rule in enumerate(rules) if rule not in rules[:layer]]


def single(case: str, layer: int) -> tuple[Decoder, AttentionRule]:
    """A decoder of one layer only, so that what it cannot see reaches the logits by no other way."""
    made = decoder_of(case, layers=(layer,))
    return made, made.semantics.attention[layer]


def seen(decoder: Decoder, tokens: torch.Tensor, changed: int) -> torch.Tensor:
    """How much each position's logits move when one token changes, [S]."""
    other = tokens.clone()
    other[:, changed] = (other[:, changed] + 1) % decoder.facts.vocab_size
    with torch.no_grad():
        return (decoder(tokens) - decoder(other)).abs().amax(dim=(0, 2))


@every_case
def test_parameters_are_the_tensors_of_the_ledger(case: str) -> None:
    assert parameters_of(decoder_of(case)) == names_and_shapes(facts(case))


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_is_built_as_the_ledger_counts_it(preset: str) -> None:
    config: dict[str, Any] = dict(preset_config(preset))
    key = "n_layer" if "n_layer" in config else "num_hidden_layers"
    config = {**config, key: min(config[key], 5)}
    for listed in ("layer_types", "no_rope_layers", "moe_layers", "hybrid_override_pattern"):
        if listed in config and not preset.startswith("nemotron"):
            del config[listed]
    if preset.startswith("nemotron"):
        config = dict(preset_config(preset))
    model = model_from_config(config, name=preset, source="")
    if any(block.attention is None for block in model.blocks):
        with pytest.raises(Refused, match="every layer has attention"):
            build_decoder(model, config)
        return
    with torch.device("meta"):
        decoder = build_decoder(model, config)
    assert parameters_of(decoder) == names_and_shapes(model)


PLANNED_ALONE = names(
    "apertus arcee deepseek_v32 ernie4_5 ernie4_5_moe exaone4 falcon_h1 gemma3n_text gemma4_text glm glm4",
    "glm4_moe_lite glm_moe_dsa gpt_bigcode gpt_neo granitemoe granitemoeshared hunyuan_v1_dense hunyuan_v1_moe",
    "internlm3 lfm2 lfm2_moe minimax_m2 ministral3 mpt nemotron olmoe seed_oss smollm3",
)
ELSEWHERE = names("granitemoehybrid jamba mamba2 minimax nemotron_h qwen3_5_moe_text qwen3_5_text qwen3_next")
"""Families of which some layers mix tokens otherwise than by attention, unless a config says not."""


@pytest.mark.parametrize("model_type", sorted(PLANNED_ALONE | ELSEWHERE))
def test_a_family_that_is_planned_alone_is_refused_by_name(model_type: str) -> None:
    config = {"model_type": model_type}
    model = model_from_config(config, name="it", source="")
    why = "whose forward pass is not written" if model_type in PLANNED_ALONE else "and only decoders whose every layer"
    with pytest.raises(Refused, match=rf"runtime-family.*{model_type}, {why}"):
        build_decoder(model, config)


def test_every_family_with_attention_is_run_and_has_a_case() -> None:
    aliases = {name for name in model_types() if family_of(name).name != name}
    assert set(READERS) == set(model_types()) - aliases - PLANNED_ALONE - ELSEWHERE
    assert {config["model_type"] for config in CASES.values()} == set(READERS)


@every_case
def test_a_later_token_changes_no_earlier_logit(case: str) -> None:
    moved = seen(decoder_of(case), tokens_of(case), changed=10)
    # not zero: an expert that gets another number of rows may multiply them in another order
    assert moved[:10].max() < 1e-5
    assert moved[10:13].min() > 1e-5


@every_case
def test_order_matters_in_the_layers_that_have_positions(case: str) -> None:
    tokens = tokens_of(case)
    swapped = tokens.clone()
    swapped[:, [LAST - 2, LAST - 1]] = tokens[:, [LAST - 1, LAST - 2]]
    for layer in kinds(case):
        decoder, rule = single(case, layer)
        with torch.no_grad():
            moved = (decoder(tokens) - decoder(swapped))[:, LAST].abs().max()
        placed = rule.rotary is not None or rule.alibi or decoder.semantics.entry.positions
        assert (moved > 1e-5) if placed else (moved < 1e-5)


@every_case
def test_a_window_is_as_wide_as_the_ledger_says(case: str) -> None:
    tokens = tokens_of(case)
    for layer in kinds(case):
        decoder, rule = single(case, layer)
        block = next(block for block in facts(case).blocks if layer in block.layers)
        assert block.attention is not None
        assert rule.window == block.attention.window
        if rule.window is None:
            assert seen(decoder, tokens, 0)[LAST] > 1e-7
            continue
        oldest = LAST // rule.window * rule.window if rule.chunked else LAST - rule.window + 1
        assert seen(decoder, tokens, oldest)[LAST] > 1e-6
        assert seen(decoder, tokens, oldest - 1)[LAST] == 0


@pytest.mark.parametrize(
    ("case", "relative"),
    [("llama", True), ("gptj", True), ("deepseek_v3", True), ("bloom", True), ("gpt2", False), ("opt", False)],
)
def test_only_learned_positions_are_absolute(case: str, relative: bool) -> None:
    decoder, tokens = decoder_of(case), tokens_of(case)
    with torch.no_grad():
        plain = decoder(tokens, torch.arange(LENGTH))
        assert torch.equal(plain, decoder(tokens))
        moved = (plain - decoder(tokens, torch.arange(LENGTH) + 7)).abs().max()
    assert (moved < 1e-4) if relative else (moved > 1e-3)


@every_case
def test_stages_chained_are_the_whole(case: str) -> None:
    layers, tokens = facts(case).num_layers, tokens_of(case)
    cut = layers // 2
    whole = decoder_of(case)
    front = decoder_of(case, layers=range(cut), last=False)
    back = decoder_of(case, layers=range(cut, layers), first=False)
    assert front.final == []
    assert back.entry == []
    assert back.embedding is None
    assert parameters_of(front) | parameters_of(back) == parameters_of(whole)
    with torch.no_grad():
        assert torch.equal(back(front(tokens)), whole(tokens))


@pytest.mark.parametrize("case", [case for case in CASES if facts(case).tied])
def test_a_tied_output_layer_is_the_table_itself(case: str) -> None:
    decoder = decoder_of(case)
    assert decoder.embedding is not None
    table = decoder.embedding.get_parameter("weight")
    assert decoder.final[-1].get_parameter("weight") is table
    assert f"{decoder.semantics.exit.head}.weight" not in dict(decoder.named_parameters())
    stage = decoder_of(case, layers=(facts(case).num_layers - 1,), first=False)
    copy = stage.get_parameter(f"{decoder.semantics.entry.tokens}.weight")
    assert stage.final[-1].get_parameter("weight") is copy
    assert torch.equal(copy, table)


def test_a_tied_output_layer_with_a_bias_is_not_cut() -> None:
    config = {**CASES["gptj"], "tie_word_embeddings": True}
    model = model_from_config(config, name="tied", source="")
    build_decoder(model, config)
    with pytest.raises(Refused, match="tie_word_embeddings=false"):
        build_decoder(model, config, layers=(2,), first=False)


@pytest.mark.parametrize("case", ["llama", "mixtral", "gpt_oss"])
def test_starting_values_follow_from_name_and_seed(case: str) -> None:
    whole, again, other = (build_decoder(facts(case), CASES[case]) for _ in range(3))
    stage = build_decoder(facts(case), CASES[case], layers=(1,), first=False, last=False)
    for decoder, seed in ((whole, 1), (again, 1), (other, 2), (stage, 1)):
        init_weights(decoder, seed)
    values = dict(whole.named_parameters())
    assert all(torch.equal(values[name], parameter) for name, parameter in again.named_parameters())
    assert all(torch.equal(values[name], parameter) for name, parameter in stage.named_parameters())
    drawn = [name for name, parameter in values.items() if parameter.std() > 0]
    assert all(not torch.equal(values[name], dict(other.named_parameters())[name]) for name in drawn)
    first, second = (values[name.replace("layers.0", f"layers.{at}")] for at in (0, 1) for name in drawn[1:2])
    assert not torch.equal(first, second)
    for stack in (parameter for name, parameter in values.items() if "experts" in name and parameter.dim() == 3):
        assert not torch.equal(stack[0], stack[1])
        assert 0.015 < float(stack.detach().std()) < 0.025


def test_matrices_and_tables_start_as_wide_as_the_config_says() -> None:
    config = {**CASES["llama"], "initializer_range": 0.25}
    decoder = build_decoder(facts("llama"), config)
    init_weights(decoder, 0)
    for name, parameter in decoder.named_parameters():
        if parameter.dim() > 1:
            assert 0.2 < float(parameter.detach().std()) < 0.3, name
        else:
            assert torch.equal(parameter, torch.ones_like(parameter)), name


@pytest.mark.parametrize(("spread", "said"), [(0, "must be above 0"), (-0.02, "must be above 0"), ("x", "a number")])
def test_a_model_that_cannot_start_is_refused(spread: object, said: str) -> None:
    with pytest.raises((BadInput, Refused), match=said):
        build_decoder(facts("llama"), {**CASES["llama"], "initializer_range": spread})


@pytest.mark.parametrize("case", [case for case in CASES if any(block.moe for block in facts(case).blocks)])
def test_an_expert_without_tokens_gets_no_gradient(case: str) -> None:
    decoder = decoder_of(case)
    chosen: dict[str, torch.Tensor] = {}
    for path, module in decoder.named_modules():
        if isinstance(module, Moe):
            module.register_forward_pre_hook(noting(path, chosen))
    decoder(tokens_of(case, rows=1, length=1)).square().sum().backward()
    for path, visited in chosen.items():
        for parameter in decoder.get_submodule(f"{path}.experts").parameters():
            assert parameter.grad is not None
            busy = parameter.grad.flatten(1).abs().amax(dim=1) > 0
            assert busy.nonzero().flatten().tolist() == visited.flatten().sort().values.tolist()


def noting(path: str, chosen: dict[str, torch.Tensor]) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
    """A hook that notes which experts the tokens of a routed network choose."""

    def hook(moe: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        assert isinstance(moe, Moe)
        chosen[path] = moe.route(args[0].flatten(0, 1))[1]

    return hook


@every_case
def test_a_recomputed_block_gives_the_same_gradients(case: str) -> None:
    gradients: list[dict[str, torch.Tensor]] = []
    for again in (False, True):
        decoder, tokens = decoder_of(case), tokens_of(case)
        for layer, block in decoder.blocks.items():
            if again:
                decoder.set_submodule(decoder.block_paths[int(layer)], Again(block))
        loss_of(decoder, tokens).backward()
        held = decoder.named_parameters()
        gradients.append({name.replace("block.", ""): p.grad for name, p in held if p.grad is not None})
    assert gradients[0].keys() == {name for name, _ in decoder_of(case).named_parameters()}
    assert all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())


class Again(nn.Module):
    """A block that keeps its input only and runs again in the backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: torch.Tensor, context: Context) -> torch.Tensor:
        return cast(
            "torch.Tensor", checkpoint(self.block, hidden, context, use_reentrant=False, preserve_rng_state=False)
        )


@every_case
def test_bf16_stays_bf16(case: str) -> None:
    decoder = decoder_of(case).to(torch.bfloat16)
    logits = decoder(tokens_of(case))
    assert logits.dtype == torch.bfloat16
    logits.float().logsumexp(dim=-1).mean().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in decoder.parameters())
    with torch.no_grad():
        exact = decoder_of(case)(tokens_of(case))
    assert (logits.float() - exact).abs().mean() < 0.05 * exact.std() + 0.01


def loss_of(decoder: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the next token."""
    return functional.cross_entropy(decoder(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.parametrize("case", ["llama", "mixtral", "deepseek_v3", "gpt2", "gpt_oss", "gemma2"])
def test_a_small_model_trains(case: str) -> None:
    decoder, tokens = build_decoder(facts(case), CASES[case]), tokens_of(case)
    init_weights(decoder, 0)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=0.01)
    losses: list[float] = []
    for _ in range(25):
        optimizer.zero_grad()
        loss = loss_of(decoder, tokens)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert abs(losses[0] - torch.tensor(float(facts(case).vocab_size)).log()) < 0.3
    assert losses[-1] < 0.5 * losses[0]


def test_attend_sees_grouped_heads_and_may_be_replaced() -> None:
    decoder = decoder_of("llama")
    shapes: list[list[torch.Size]] = []
    block = decoder.get_submodule(decoder.block_paths[0])
    attention: Any = block.get_submodule("self_attn")
    assert attention.plain_up_to(LENGTH)
    own = attention.attend

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        shapes.append([q.shape, k.shape, v.shape])
        return own(q, k, v)

    attention.attend = attend
    decoder(tokens_of("llama"))
    assert shapes == [[(2, 4, LENGTH, 8), (2, 2, LENGTH, 8), (2, 2, LENGTH, 8)]]


def test_a_layer_says_when_it_is_more_than_causal_attention() -> None:
    attention: Any = decoder_of("mistral").get_submodule("model.layers.0.self_attn")
    assert attention.plain_up_to(5)
    assert not attention.plain_up_to(6)
    for case, path in (("bloom", "transformer.h.0.self_attention"), ("gpt_oss", "model.layers.1.self_attn")):
        assert not decoder_of(case).get_submodule(path).plain_up_to(2)  # pyright: ignore[reportCallIssue]  # an Attention


def test_routers_choose_within_groups_and_weigh_without_the_correction() -> None:
    rule = MoeRule(router="sigmoid", top_k=2, groups=4, top_groups=1, group_of_two=True, renormalise=True, scaling=2.5)
    scores = torch.tensor([[3.0, -9.0, 1.0, 0.9, 2.0, -9.0, 0.0, 0.1]])
    gate = torch.nn.Identity()
    weights, chosen = route(rule, gate, scores, None)
    assert chosen.sort().values.tolist() == [[2, 3]]
    assert weights.sum().item() == pytest.approx(2.5)
    correction = torch.zeros(8)
    correction[6:] = 5.0
    weights, chosen = route(rule, gate, scores, correction)
    assert chosen.sort().values.tolist() == [[6, 7]]
    expected = scores[0, 6:].sigmoid() / scores[0, 6:].sigmoid().sum() * 2.5
    assert torch.allclose(weights.sort().values[0], expected)


@pytest.mark.parametrize(
    ("case", "changes", "words"),
    [
        ("llama", {"hidden_act": "tanhshrink"}, "hidden_act is 'tanhshrink'"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "factor is None"),
        ("llama", {"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
        ("granite", {"residual_multiplier": True}, "residual_multiplier is True"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("gptj", {"rotary_dim": 10}, "rotary_dim is 10"),
        ("opt", {"layerdrop": 0.1}, "layerdrop skips layers"),
        ("falcon-multi-query", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn"),
        ("falcon-new", {"parallel_attn": False}, "parallel_attn=true"),
        ("llama", {"pretraining_speedup": 2}, "pretraining_speedup is 2, which could change the forward pass"),
    ],
)
def test_what_is_not_understood_is_refused(case: str, changes: dict[str, Any], words: str) -> None:
    config = {**CASES[case], **changes}
    plain = {key: value for key, value in config.items() if key != "pretraining_speedup"}
    model = model_from_config(plain, name="odd", source="")
    with pytest.raises((BadInput, Refused), match=words):
        read_semantics(model, config)
