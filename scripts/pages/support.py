"""The page of what is proven, from the recorded proof, and of what `prove` refuses, from what it answers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pages.executed import output_of
from pages.hardware import table
from proofs.cells import FULL, SUBJECTS
from proofs.record import RECORDED, Record, Result, load
from trainledger.errors import Refused
from trainledger.facts.presets import load_preset, preset_names
from trainledger.service.prove_plan import planned
from trainledger.service.prove_request import Request
from trainledger.units import format_bytes

INTRO = """# What is proven

Written by `python scripts/docs.py` from `docs/data/proof.json`, which `python scripts/proof.py --record` writes. A cell
is one `trainledger prove`: the plan is run on its ranks, and every line of every rank is compared with what was
measured ([proof](proof.md)). Lines counted here are those with a prediction to meet: exact ones were equal, modelled
ones within their tolerance, and nothing was held or sent beside them. The gradient error is the worst relative error of
a whole gradient, at the first step and the tenth, against a run of one process that knows no parallelism, of a small
model of the same kind under the same plan.

"""

EMPTY = """# What is proven

No proof is recorded in this checkout: `make proof`, then `python scripts/proof.py --record` and `make docs`.
"""

PROOF = """{cells} cells, {lines} lines, {date}: commit `{commit}`, PyTorch {torch}, {cpu}, {cores} cores, {memory};
plans at random from seed {seed}. To repeat it: `make proof`.

"""

LAYOUTS = """## Models and layouts

Lines compared on all ranks together, and the worst gradient error (in fp32 alone). Data-parallel rows hold a run for
each number of ranks, with one micro-batch and with two. `full-q` is DeepSeek-V2 with `--set q_lora_rank=null`.

"""

RANDOM = """
## Plans at random

Drawn from what no rule refuses.

"""

DRY = """
## At full size, dry

{flags}: fake tensors, a fake process group, and one rank of each that should do the same.

"""

MEMORY = """
## Saved activations and peaks

How far off the prediction was at worst, of any rank of any cell. Where tokens go to experts of other ranks a router
decides how many each gets, and only dry runs, which route evenly, are judged rank by rank.

"""

GROUPS: Mapping[str, str] = {
    "plans at random": "/random-",
    "full size, dry": "^dry/",
    "fp16, FP8 and 8-bit moments": "-(fp16|fp8|adamw-8bit)",
    "pipelines": "/pp",
    "context parallelism": "/cp",
    "expert parallelism": "/ep",
    "tensor parallelism": "/tp",
    "recomputation": "-recompute",
    "bf16": "-bf16",
    "data parallelism": "/dp",
}
"""Cells by what is found in their names, the first that fits."""

FAULTS = """
## Faults that were planted

Each in the observed step of a run of llama-3-8b on two ranks at `--zero 3`. The verdict was `differs`, and nothing but
this was blamed:

"""

REFUSED = """
## What is refused

By rule, before a process starts ([rules](rules.md)):

"""

PRESETS = """
Of the {count} presets, these are refused a layout that others can have:

"""

ASKED: tuple[str, ...] = (
    "llama-3-8b --engine megatron",
    "nemotron-h-56b",
    "llama-3-8b --precision bf16-pure",
    "gpt2 --precision fp8-rowwise",
    "llama-3-8b --precision fp8-rowwise --seq 100",
    "llama-3-8b --precision fp8-tensorwise --dp 3 --zero 3",
    "olmo-2-7b --precision fp8-tensorwise --dp 2 --zero 3 --set model_type=olmo",
    "llama-3-8b --precision fp8-rowwise --pp 2 --schedule zero-bubble",
    "llama-3-8b --optimizer muon",
    "llama-3-8b --attention eager",
    "llama-3-8b --lora-rank 8",
    "llama-3-8b --ema",
    "deepseek-v3 --mtp",
    "llama-3-8b --dp 2 --zero 3 --offload parameters",
    "llama-3-8b --dp 2 --cp 2 --cp-comm all_to_all",
    "llama-3-8b --pp 2 --schedule interleaved",
    "llama-3-8b --pp 4 --gbs 3",
    "llama-3-8b --pp 3 --pp-layout 16,0,16",
    "mixtral-8x7b --dp 2 --ep 2 --tp 2",
    "mixtral-8x7b --tp 2 --etp 1",
    "qwen2.5-0.5b --tp 2 --set vocab_size=151937",
    "gpt2 --tp 2 --set vocab_size=50304",
    "mixtral-8x7b --tp 8 --set intermediate_size=14352",
    "gpt2 --pp 2 --set model_type=gptj --set tie_word_embeddings=true",
    "gpt2 --seq 2048",
    "mistral-7b-v0.1 --cp 2 --seq 8192",
    "llama-3-8b --cp 2 --gpu h100 --cluster-args '--nproc-per-node 2'",
    "llama-3-8b --dp 128",
    "llama-3-8b --dp 2 --dry",
    "mixtral-8x7b --dp 2 --zero 3 --dry",
    "llama-3-8b --dp 2048 --zero 3 --dry",
)
"""What `prove` refuses, a rule each."""

PROBES: Mapping[str, dict[str, Any]] = {
    "`--dp 2 --zero 3`": {"dp": 2, "zero": 3},
    "`--tp 2`": {"tp": 2},
    "`--pp 2`": {"pp": 2},
    "`--cp 2`": {"cp": 2},
    "`--ep 2 --dp 2`": {"ep": 2, "dp": 2},
}
"""Layouts that a preset is asked for; experts are asked of those that have some."""


def render() -> str:
    """The whole page."""
    record = load(RECORDED)
    proven = [EMPTY] if record is None else [INTRO, *_proven(record)]
    count = len(preset_names())
    return "".join([*proven, REFUSED, table(("asked", "answer"), _refused()), PRESETS.format(count=count), _presets()])


def _proven(record: Record) -> Iterator[str]:
    cells = record.cells
    yield PROOF.format(
        cells=f"{len(cells):,}",
        lines=f"{sum(cell.lines for cell in cells):,}",
        date=record.date,
        commit=record.commit[:12],
        torch=record.torch,
        cpu=record.machine.cpu,
        cores=record.machine.cores,
        memory=format_bytes(record.machine.memory_bytes),
        seed=record.seed,
    )
    drawn = [cell for cell in cells if _layout(cell).startswith("random-")]
    yield LAYOUTS + _layouts(cell for cell in cells if cell.kind == "run" and cell not in drawn)
    yield RANDOM + table(("model", "plan", "ranks", "lines", "gradient error"), map(_row, drawn))
    yield DRY.format(flags=f"`{_common()}`") + table(("model", "plan", "ranks", "lines"), _dry(cells))
    if any(cell.peak_error is not None for cell in cells):
        yield MEMORY + table(("cells", "runs", "saved activations", "peak"), _memory(cells))
    named = ((cell.id.partition("/")[2], "; ".join(cell.named)) for cell in cells if cell.kind == "fault")
    yield FAULTS + table(("planted", "named"), named)


def _layout(cell: Result) -> str:
    return cell.id.rpartition("/")[2]


def _layouts(cells: Iterable[Result]) -> str:
    """A row per layout, a column per model."""
    rows: dict[str, dict[str, list[Result]]] = {}
    for cell in cells:
        model = cell.id.partition("/")[0]
        rows.setdefault(_plan(cell), {}).setdefault(model, []).append(cell)
    names = [subject.name for subject in SUBJECTS]
    head = ("plan", "ranks", *(name.replace("deepseek-v2-", "") for name in names))
    return table(
        head, ([f"`{plan}`", _ranks(of), *(_cell(of.get(name, [])) for name in names)] for plan, of in rows.items())
    )


def _plan(cell: Result) -> str:
    """The flags of a layout, those of several numbers of ranks and micro-batches as one."""
    flags = re.sub(r"--set \S+ ?", "", cell.flags)
    if re.fullmatch(r"dp\d-zero\d-mb\d", _layout(cell)):
        flags = re.sub(r"--dp \d+ (.*) --gbs \d+", r"--dp N \1", flags)
    return flags


def _ranks(row: Mapping[str, list[Result]]) -> str:
    return ", ".join(map(str, sorted({cell.ranks for cells in row.values() for cell in cells})))


def _cell(cells: list[Result]) -> str:
    """What was compared of a model in a layout; a dash where it has no such layout."""
    return f"{sum(cell.lines for cell in cells):,}{_error(cells)}" if cells else "-"


def _error(cells: Iterable[Result]) -> str:
    errors = [cell.gradient_error for cell in cells if cell.gradient_error is not None]
    return f", {max(errors):.0e}" if errors else ""


def _row(cell: Result) -> list[str]:
    error = "-" if cell.gradient_error is None else f"{cell.gradient_error:.0e}"
    return [cell.model, f"`{cell.flags}`", str(cell.ranks), f"{cell.lines:,}", error]


def _common() -> str:
    return f"--dry --full-size --seq {FULL['seq']} --precision {FULL['precision']}"


def _dry(cells: Iterable[Result]) -> Iterator[list[str]]:
    for cell in cells:
        if cell.kind == "dry":
            yield [cell.model, f"`{cell.flags.partition(' --dry')[0]}`", str(cell.ranks), f"{cell.lines:,}"]


def _memory(cells: Iterable[Result]) -> Iterator[list[str]]:
    groups: dict[str, list[Result]] = {name: [] for name in GROUPS}
    for cell in cells:
        fits = (name for name, found in GROUPS.items() if re.search(found, cell.id))
        if cell.kind != "fault":
            groups[next(fits)].append(cell)
    for name, group in groups.items():
        errors = ([one.saved_error for one in group], [one.peak_error for one in group])
        yield [name, str(len(group)), *map(_worst, errors)]


def _worst(errors: Iterable[float | None]) -> str:
    known = [error for error in errors if error is not None]
    return f"{max(known):.2%}" if known else "-"


def _refused() -> Iterator[list[str]]:
    for words in ASKED:
        said = output_of(f"trainledger prove {words}").strip()
        if not said.startswith("error: ["):
            raise SystemExit(f"pages/support.py: no rule refuses `trainledger prove {words}`, which says: {said}")
        yield [f"`{words}`", said.removeprefix("error: ")]


def _presets() -> str:
    """Presets by the rule that refuses them, and the layouts for which it does."""
    found: dict[tuple[str, str], list[str]] = {}
    for name in preset_names():
        routed = any(block.moe is not None for block in load_preset(name).blocks)
        probes = {title: probe for title, probe in PROBES.items() if routed or "ep" not in probe}
        refused = {title: rule for title, probe in probes.items() if (rule := _rule(name, probe))}
        for rule in dict.fromkeys(refused.values()):
            titles = [title for title in probes if refused.get(title) == rule]
            said = "any" if len(titles) == len(probes) else ", ".join(titles)
            found.setdefault((said, rule), []).append(name)
    return table(
        ("plan", "rule", "presets"), ([said, f"`{rule}`", ", ".join(of)] for (said, rule), of in found.items())
    )


def _rule(name: str, probe: Mapping[str, Any]) -> str:
    """The rule that refuses a preset a layout; "" where none does."""
    try:
        planned(Request(model=name, full_size=True, **probe))
    except Refused as refusal:
        return refusal.rule
    return ""
