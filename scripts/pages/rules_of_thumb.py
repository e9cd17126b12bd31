"""The page that audits rules of thumb: each claim beside what the ledger says of it.

The digits of a quoted claim are the claim's own; all others come from scripts/audit_figures.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple

import audit_figures as figures
from trainledger.account.rules_of_thumb import Convention, zero_mem
from trainledger.facts.workload import DEFAULT_SEQ

INTRO = """# Rules of thumb, audited

What is often said of training memory, beside what the ledger says. In a quoted claim the digits are the claim's own;
every other digit on this page is computed, by the accounts that `states` and `ledger` print. GB are decimal. "paper" is
the ZeRO paper's accounting; the other names are engines, as their source has it.
"""


class Claim(NamedTuple):
    """One audited claim, as Markdown."""

    title: str
    says: str
    verdict: str
    shows: str
    why: str


def render() -> str:
    """The whole page."""
    claims = (
        optimizer_copies(), weights_share(), stage_shares(), communication(), fp8_halves(), fp16_range(), by_size(),
        copied_function(),
    )  # fmt: skip
    return "\n".join([INTRO, *map(_section, claims)])


def _section(claim: Claim) -> str:
    parts = (f"## {claim.title}", f"> {claim.says}", f"**{claim.verdict}**", claim.shows, claim.why)
    return "\n\n".join(parts) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """A Markdown table whose first columns are words and the rest figures."""
    rule = ["---"] * words + ["---:"] * (len(head) - words)
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *rows))


def gb(amount_bytes: float) -> str:
    """Decimal GB to a tenth."""
    return f"{amount_bytes / 10**9:.1f}"


def percent(share: float | Fraction) -> str:
    """A share, to a tenth of a percent where that is not zero.

    >>> percent(0.125), percent(0.25)
    ('12.5 %', '25 %')
    """
    return f"{float(100 * share):.1f}".removesuffix(".0") + " %"


def optimizer_copies() -> Claim:
    """Weights, gradients and optimizer of a 70B model."""
    two, three, moments, usual = figures.optimizer_copies()
    return Claim(
        title="What a 70B model weighs in 16 bits",
        says="70B in 16-bit: weights 140 GB, gradients 140 GB, optimizer 280-420 GB (two or three copies).",
        verdict="Weights and gradients hold. The optimizer is counted in 16-bit copies, and Adam's states are fp32.",
        shows=table(
            ("the optimizer keeps", "engine", "weights, GB", "gradients, GB", "optimizer, GB"),
            [(row.what, row.engine, *map(gb, row[2:])) for row in (two, three, moments, usual)],
            words=2,
        ),
        why=f"Two copies of the 16-bit weights are {gb(two.optimizer)} GB and three are {gb(three.optimizer)} GB: that "
        "is what engines with 16-bit moments hold. Mixed precision as most people run it keeps both moments in fp32, "
        f"{gb(moments.optimizer)} GB, and an fp32 master where the weights are 16-bit: {gb(usual.optimizer)} GB in "
        f"all, {usual.optimizer // usual.weights} times the weights.",
    )


def weights_share() -> Claim:
    """What the weights are of the whole."""
    rows = figures.weight_shares()
    shares = [row.weights / row.total for row in rows]
    bare = figures.optimizer_copies()[-1]
    undivided = Fraction(bare.weights, bare.weights + bare.gradients + bare.optimizer)
    inside = sum(Fraction(20, 100) <= share <= Fraction(30, 100) for share in shares)
    return Claim(
        title="The share of the weights",
        says="Weights are 20-30 % of training memory.",
        verdict=f"It depends on the plan: from {percent(min(shares))} to {percent(max(shares))} in these "
        f"{len(rows)}, of which {inside} lies in the range.",
        shows=table(
            ("model", "engine", "plan", "weights, GB", "peak, GB", "share"),
            [(r.model, r.engine, r.plan, gb(r.weights), gb(r.total), percent(r.weights / r.total)) for r in rows],
            words=3,
        ),
        why=f"Undivided, 16-bit weights are {percent(undivided)} of the states. ZeRO-1 and ZeRO-2 divide everything "
        "else, so the share rises with the number of cards; ZeRO-3 divides the weights too, and activations make the "
        f"rest. Each peak is that of the fullest card: sequences of {DEFAULT_SEQ} tokens, one at a time, with full "
        "recompute except in the row of Megatron.",
    )


def stage_shares() -> Claim:
    """What each zero_stage leaves on a card."""
    few, *more = cards = (8, 64, 1024)
    claimed = [figures.stage_share(few, stage) for stage in (1, 2, 3)]
    half, quarter = figures.ranks_where(1, Fraction(1, 2)), figures.ranks_where(2, Fraction(1, 4))
    usual = figures.optimizer_copies()[-1]
    per_param = [amount // figures.SEVENTY for amount in usual[2:]]
    weights, optimizer = (Fraction(part, sum(per_param)) for part in (per_param[0], per_param[2]))
    return Claim(
        title="What each ZeRO stage leaves on a card",
        says="ZeRO-1 leaves about 50 % per card, ZeRO-2 about 25 %, ZeRO-3 one Nth (8 cards: 12 %).",
        verdict=f"Only ZeRO-3 holds. On {few} cards the shares are {', '.join(map(percent, claimed))}.",
        shows=table(
            ("cards", "ZeRO-1", "ZeRO-2", "ZeRO-3"),
            [(str(n), *(percent(figures.stage_share(n, stage)) for stage in (1, 2, 3))) for n in cards],
        ),
        why=f"With {' + '.join(map(str, per_param))} bytes per parameter ZeRO-1 divides {percent(optimizer)} of the "
        f"states, so it leaves half at {half} cards and tends to {percent(1 - optimizer)}; ZeRO-2 leaves a quarter at "
        f"{quarter} cards and tends to {percent(weights)}. No such share is a property of the stage: it depends on how "
        f"many cards divide, as the rows of {' and '.join(map(str, more))} show.",
    )


def communication() -> Claim:
    """What ZeRO adds to the wire."""
    cards, micro_batches = 64, 8
    one, many = figures.traffic_ratios(cards, 1), figures.traffic_ratios(cards, micro_batches)

    def row(engine: str, count: int, ratios: dict[int, float]) -> tuple[str, ...]:
        cells = (f"{ratios[stage]:.2f}" if stage in ratios else "-" for stage in figures.STAGES)
        return (engine, str(count), *cells)

    return Claim(
        title="What ZeRO costs on the wire",
        says="ZeRO-1 and ZeRO-2 add no communication, and ZeRO-3 makes it about 1.5 times as much.",
        verdict="True of the paper with one micro-batch per step. Not of the engines, and not with accumulation.",
        shows=f"Bytes per card and step over those of one 16-bit all-reduce of the gradients, llama-2-7b on {cards} "
        "cards:\n\n"
        + table(
            ("engine", "micro-batches", "plain", "ZeRO-1", "ZeRO-2", "ZeRO-3"),
            [row(name, n, ratios[name]) for name in one for n, ratios in ((1, one), (micro_batches, many))],
            words=2,
        ),
        why="DeepSpeed's ZeRO-1 and ZeRO-2 all-reduce each bucket and keep a slice, then gather the weights: "
        f"{one['deepspeed'][1]:.2f} times. Megatron reduces fp32 gradients unless told otherwise, so plain data "
        f"parallelism costs {one['megatron'][0]:.2f} and its distributed optimizer less than that, "
        f"{one['megatron'][1]:.2f}. PyTorch gathers 16-bit weights and reduces in fp32. With {micro_batches} "
        "micro-batches, whoever scatters gradients per micro-batch pays each time: in the paper's own accounting "
        f"{many['paper'][2]:.1f} times under ZeRO-2 and {many['paper'][3]:.1f} under ZeRO-3. That is why ZeRO-1 goes "
        "with accumulation.",
    )


def fp8_halves() -> Claim:
    """What FP8 saves."""
    rows = figures.fp8_recipes()
    engine = max(row.of_bf16 for row in rows)
    lm = rows[-1]
    told, plain = (zero_mem(70, 1, 0, fp8=fp8) for fp8 in (True, False))
    return Claim(
        title="What FP8 saves",
        says="FP8 makes weights and gradients one byte each, so memory halves.",
        verdict="FP8 recipes change the arithmetic, not the states: in the usual engines they keep as much or more.",
        shows="Bytes per parameter at the end of backward, nothing divided (llama-3-70b):\n\n"
        + table(
            ("recipe", "card", "weights", "gradients", "all states", "of bf16"),
            [
                (r.recipe, r.card, f"{r.weights:.2f}", f"{r.gradients:.2f}", f"{r.total:.2f}", percent(r.of_bf16))
                for r in rows
            ],
            words=2,
        ),
        why="torchao casts on the fly and keeps the fp32 shards. TransformerEngine keeps FP8 copies beside the 16-bit "
        "weights, two where the card multiplies FP8 matrices in one layout only or the scales go by rows and columns, "
        f"and so needs up to {percent(engine)} of bf16. FP8-LM is the exception: FP8 gradients and first moments, "
        f"16-bit weights and second moments, {lm.total:.0f} bytes in all, and most of what it saves is in the "
        f"optimizer. One-byte weights alone take a 70B model from {plain:.0f} to {told:.0f} GB, "
        f"{percent(told / plain)}.",
    )


def fp16_range() -> Claim:
    """Ranges of the formats, from their bits."""
    by_name = {form.name: form for form in figures.FORMATS}
    return Claim(
        title="The range of FP16",
        says="FP16 has a large range.",
        verdict=f"It ends at {by_name['fp16'].largest:,.0f}, which is why FP16 training needs a loss scale.",
        shows=table(
            ("format", "exponent bits", "mantissa bits", "largest", "smallest normal"),
            [
                (f.name, str(f.exponent_bits), str(f.mantissa_bits), _number(f.largest), _number(f.smallest_normal))
                for f in figures.FORMATS
            ],
        ),
        why=f"Range is exponent bits. FP8 e5m2 has those of FP16, hence its {_number(by_name['fp8 e5m2'].largest)}; "
        f"e4m3 has one fewer and ends at {_number(by_name['fp8 e4m3'].largest)}, although it gives up infinities to "
        f"get there. bf16 has the exponent of fp32 and reaches {_number(by_name['bf16'].largest)}, with fewer digits.",
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if 1 <= value < 10**6 else f"{value:.3g}"


def by_size() -> Claim:
    """Which plan fits which model."""
    usable = figures.usable_bytes()
    rows: list[tuple[str, ...]] = []
    for model, counts in figures.FIT_CARDS.items():
        held = figures.held_by_plain_zero(model)
        for cards in counts:
            cells = (held[cards, stage] for stage in figures.STAGES)
            rows.append((model, str(cards), *(f"**{gb(b)}**" if b <= usable else gb(b) for b in cells)))
    counts, seventy = figures.FIT_CARDS["llama-3-70b"], figures.held_by_plain_zero("llama-3-70b")
    fits = next(cards for cards in counts if seventy[cards, 3] <= usable)
    least = min(seventy[cards, 2] for cards in counts)
    moved, data, layout = figures.layout_traffic(), figures.layout_data_traffic(), figures.LAYOUT
    return Claim(
        title="Which parallelism for which size",
        says="8-32 cards: data parallelism with ZeRO-2. Above 70B: DP x TP x PP x ZeRO-3. Fix TP and PP inside the "
        "scale-up domain first.",
        verdict="ZeRO-2 is right for small models only; ZeRO-3 and pipelines do not go together; TP belongs inside the "
        "domain, PP need not.",
        shows=f"GB on the fullest card, paper accounting, full recompute, bold where it fits the {gb(usable)} GB that "
        "an H100 offers (allocator and context come on top):\n\n"
        + table(("model", "cards", "plain", "ZeRO-1", "ZeRO-2", "ZeRO-3"), rows, words=2),
        why=f"With ZeRO-2 a 70B model never needs less than {gb(least)} GB on these counts; with plain ZeRO-3 it fits "
        f"from {fits} cards on, and on {counts[-1]} it takes {gb(seventy[counts[-1], 3])} GB. Under a pipeline ZeRO-3 "
        f"gathers weights for every micro-batch: at tp {layout['tp']}, pp {layout['pp']} and "
        f"{layout['num_microbatches']} micro-batches its data-parallel traffic is {gb(data[3])} GB per card and step "
        f"against {gb(data[1])} GB of ZeRO-1, and DeepSpeed refuses the pair "
        f"(*{figures.refusal('ds-zero-ge2-with-pp')}*). In the same layout Megatron moves {gb(moved['tp'])} GB by "
        f"tensor, {gb(moved['dp'])} GB by data and {gb(moved['pp'])} GB by pipeline parallelism: tensor parallelism "
        "needs the fast links, a pipeline crosses slow ones well.",
    )


def copied_function() -> Claim:
    """The much-copied function, number for number."""
    billions, cards, per_param = 70, 64, 3

    def row(convention: Convention, fp8: bool) -> tuple[str, ...]:
        held = (zero_mem(billions, cards, stage, fp8=fp8, convention=convention) for stage in figures.STAGES)
        return (f"{convention}, FP8" if fp8 else convention, *(f"{amount:.1f}" for amount in held))

    claimed = per_param * figures.SEVENTY / cards
    own, mixed = (
        zero_mem(billions, cards, 3, fp8=True, convention=convention) for convention in ("published", "mixed")
    )
    return Claim(
        title="The much-copied function",
        says="`zero_mem(70, 64, stage=3, fp8=True)` is 3.3 GB.",
        verdict=f"Its own arithmetic gives {own:.1f} GB, and mixed-precision Adam with FP8 weights {mixed:.1f} GB.",
        shows=f"GB per card, {billions}B on {cards} cards:\n\n"
        + table(
            ("convention", "plain", "ZeRO-1", "ZeRO-2", "ZeRO-3"),
            [row(convention, fp8) for convention in ("published", "mixed") for fp8 in (False, True)],
        ),
        why=f"{gb(claimed)} GB is {per_param} bytes per parameter over {cards} cards: one for weights, one for "
        "gradients and one for the whole optimizer, which the function itself counts as eight. It has no master copy, "
        "makes gradients one byte under FP8, and divides the weights under ZeRO-2 already, so that its ZeRO-2 and "
        "ZeRO-3 are one number. The package has both conventions: `zero_mem(..., convention='published')` is the "
        "function as it is copied.",
    )
