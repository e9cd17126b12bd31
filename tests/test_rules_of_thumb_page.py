"""Every audited claim's figures, against arithmetic written out here, and the page that shows them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"


@pytest.fixture(scope="module", autouse=True)
def scripts_on_the_path() -> Iterator[None]:
    sys.path.insert(0, str(SCRIPTS))
    yield
    sys.path.remove(str(SCRIPTS))


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    return importlib.import_module("audit_figures")


@pytest.fixture(scope="module")
def page() -> str:
    return importlib.import_module("pages.rules_of_thumb").render()


def section(page: str, title: str) -> str:
    return page.split(f"## {title}\n")[1].partition("\n## ")[0]


def test_optimizer_copies(figures: ModuleType, page: str) -> None:
    rows = figures.optimizer_copies()
    billions = [(row.weights // 10**9, row.gradients // 10**9, row.optimizer // 10**9) for row in rows]
    assert billions == [(140, 140, 280), (140, 280, 420), (280, 280, 560), (140, 140, 840)]
    said = section(page, "What a 70B model weighs in 16 bits")
    for figure in ("280.0 GB", "420.0 GB", "560.0 GB", "840.0 GB in all", "6 times"):
        assert figure in said


def test_weight_shares(figures: ModuleType, page: str) -> None:
    rows = figures.weight_shares()
    # llama-2-7b has 6,738,415,616 parameters; 2 + 2 + 12 bytes each, and activations on top
    params, activations = 6_738_415_616, rows[0].total - 16 * 6_738_415_616
    assert rows[0].weights == 2 * params
    assert 0 < activations < 3 * 10**9
    assert rows[1].total - activations == 4 * params + 12 * params // 8
    assert rows[2].total - activations == 2 * params + 14 * params // 64
    # DDP: 4 of 4 + 4 + 4 (buckets) + 8 bytes, and the square roots of a foreach step
    assert rows[3].weights / rows[3].total == pytest.approx(4 / 24, abs=0.001)
    shares = [row.weights / row.total for row in rows]
    assert min(shares) < 0.10
    assert max(shares) > 0.75
    assert "12.5 % of the states" in section(page, "The share of the weights")


def test_stage_shares(figures: ModuleType, page: str) -> None:
    for cards in (8, 64, 1024):
        shares = [figures.stage_share(cards, stage) for stage in (1, 2, 3)]
        assert shares == [(4 + Fraction(12, cards)) / 16, (2 + Fraction(14, cards)) / 16, Fraction(1, cards)]
    assert figures.ranks_where(1, Fraction(1, 2)) == 3
    assert figures.ranks_where(2, Fraction(1, 4)) == 7
    assert figures.ranks_where(1, Fraction(1, 4)) == 0
    said = section(page, "What each ZeRO stage leaves on a card")
    for figure in ("34.4 %, 23.4 %, 12.5 %", "2 + 2 + 12", "half at 3 cards", "a quarter at 7 cards", "| 64 | 26.2 %"):
        assert figure in said


def by_stage(*ratios: float) -> object:
    return pytest.approx(dict(enumerate(ratios)), rel=0.005)


def test_communication(figures: ModuleType, page: str) -> None:
    one, eight = figures.traffic_ratios(64, 1), figures.traffic_ratios(64, 8)
    assert one["paper"] == by_stage(1, 1, 1, 1.5)
    assert eight["paper"] == by_stage(1, 1, 4.5, 12)
    assert one["deepspeed"] == by_stage(1, 1.5, 1.5, 1.5)
    assert eight["deepspeed"] == by_stage(1, 1.5, 8.5, 12)
    assert one["pytorch"] == by_stage(2, 1.5, 1.5, 2)
    assert eight["pytorch"] == by_stage(2, 1.5, 8.5, 16)
    assert [one["megatron"][stage] for stage in (0, 1)] == pytest.approx([2, 1.5], rel=0.005)
    said = section(page, "What ZeRO costs on the wire")
    for row in ("| paper | 1 | 1.00 | 1.00 | 1.00 | 1.50 |", "| deepspeed | 1 | 1.00 | 1.50 | 1.50 | 1.50 |",
                "| pytorch | 8 | 2.00 | 1.50 | 8.50 | 16.00 |"):  # fmt: skip
        assert row in said


def test_fp8(figures: ModuleType, page: str) -> None:
    rows = {(row.recipe, row.card.partition("-")[0]): row for row in figures.fp8_recipes()}
    for recipe in ("torchao tensorwise", "torchao rowwise"):
        assert rows[recipe, "H100"].of_bf16 == 1
        # and, of replicas that are reduced unit by unit, the input of one unit's reduction
        assert rows[recipe, "H100"].total == pytest.approx(16, abs=0.1)
    # all but embedding, output layer and norms of llama-3-70b are matrices of blocks: 97 % of its parameters
    matrices = 1 - (2 * 128256 * 8192 + 161 * 8192) / 70_553_706_496
    delayed, blackwell = rows["TransformerEngine delayed", "H100"], rows["TransformerEngine delayed", "B200"]
    assert delayed.weights == pytest.approx(2 + 2 * matrices)
    assert blackwell.weights == pytest.approx(2 + matrices)
    assert delayed.gradients == 4
    assert rows["TransformerEngine MXFP8", "B200"].weights == pytest.approx(2 + (2 + 2 / 32) * matrices)
    lm = rows["FP8-LM", "H100"]
    assert (lm.weights, lm.gradients, lm.total, lm.of_bf16) == (2, 1, 6, 0.375)
    said = section(page, "What FP8 saves")
    assert "6 bytes in all" in said
    assert "from 1120 to 1050 GB, 93.8 %" in said


def test_formats(figures: ModuleType, page: str) -> None:
    largest = {form.name: form.largest for form in figures.FORMATS}
    assert largest["fp16"] == 65504
    assert largest["fp8 e5m2"] == 57344
    assert largest["fp8 e4m3"] == 448
    assert largest["bf16"] == pytest.approx(3.3895314e38)
    assert largest["fp32"] == pytest.approx(3.4028235e38)
    assert {form.name: form.smallest_normal for form in figures.FORMATS}["fp16"] == 2**-14
    said = section(page, "The range of FP16")
    for figure in ("ends at 65,504", "57,344", "448", "3.39e+38"):
        assert figure in said


def test_by_size(figures: ModuleType, page: str) -> None:
    usable = figures.usable_bytes()
    seven, seventy = (figures.held_by_plain_zero(name) for name in ("llama-2-7b", "llama-3-70b"))
    assert seven[8, 0] > usable >= seven[8, 1]
    assert all(seventy[cards, 2] > usable for cards in (8, 16, 32, 64))
    assert seventy[8, 3] > usable
    assert seventy[64, 3] < usable // 2
    # weights and gradients whole or divided, activations as they are
    states = 70_553_706_496 * 16
    assert seventy[16, 3] - seventy[64, 3] == pytest.approx(states // 16 - states // 64, rel=1e-6)
    moved = figures.layout_traffic()
    assert moved["tp"] > 10 * moved["dp"] > 100 * moved["pp"]
    data = figures.layout_data_traffic()
    assert data[3] / data[1] == pytest.approx(1.5 * 16)
    said = section(page, "Which parallelism for which size")
    assert "runs --zero 0 and 1 only" in said
    # 6,738,415,616 parameters; 32 inputs of blocks, the input of the output layer, and 32,000 logits in bf16 and fp32
    params, activations = 6_738_415_616, 4096 * (33 * 2 * 4096 + 32_000 * (2 + 4))
    per_card = [params * (16 - divided) + params * divided // 8 + activations for divided in (0, 12, 14, 16)]
    assert [seven[8, stage] for stage in range(4)] == per_card
    plain, *divided = (f"{amount / 1e9:.1f}" for amount in per_card)
    assert f"| llama-2-7b | 8 | {plain} | {' | '.join(f'**{amount}**' for amount in divided)} |" in said


def test_copied_function(page: str) -> None:
    said = section(page, "The much-copied function")
    assert "Its own arithmetic gives 10.9 GB, and mixed-precision Adam with FP8 weights 16.4 GB." in said
    assert "3.3 GB is 3 bytes per parameter over 64 cards" in said
    assert "| mixed | 1120.0 | 293.1 | 155.3 | 17.5 |" in said
    assert "| published, FP8 | 700.0 | 148.8 | 10.9 | 10.9 |" in said


def test_a_claim_has_a_verdict_and_a_reason(page: str) -> None:
    sections = page.split("\n## ")[1:]
    assert len(sections) == 8
    for text in sections:
        says, verdict, *rest = [part for part in text.split("\n\n") if part][1:]
        assert says.startswith("> ")
        assert verdict.startswith("**")
        assert any(part.startswith("| ") for part in rest)
