"""What a row says of how its run was run, in the words of data/measured/run_words.toml.

Where a cell is blank, the reading of the engine says what its releases do unasked, and that is listed as assumed.
"""

from __future__ import annotations

import dataclasses

from trainledger.scoring.cells import Cells
from trainledger.scoring.phrases import find, meanings, one_meaning
from trainledger.scoring.run_engine import EngineReading
from trainledger.scoring.words import Unclear


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """What is computed again in the backward.

    how     none | full | selective
    parts   of a block, where selective: "ops" chosen one by one, or "core_attn", "layernorm", "mlp" ...; () if unsaid
    every   full: every n-th block alone; 0: all
    blocks  full: so many blocks of a stage alone; 0: all
    """

    how: str
    parts: tuple[str, ...] = ()
    every: int = 0
    blocks: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """How a run was run; "" and None where neither the row nor the engine's reading says.

    precision    of matrix products; covers: which of them, where not all
    weights      "pure": no copy in more bits; "fp8": kept in 8 bits
    gradients    fp32 | bf16 | fp16 | 16-bit
    loss         fused | linear | parallel | eager | compiled, and in how many chunks (0: not chunked)
    """

    precision: str
    covers: str
    weights: str
    gradients: str
    optimizer: str
    recompute: Recompute
    schedule: str
    layout: str
    attention: str
    loss: str
    loss_chunks: int
    allocator: str
    compiled: bool | None
    flags: tuple[str, ...]
    offload: tuple[str, ...]
    routing: str
    cp_comm: str
    assumed: tuple[str, ...]


def told(cells: Cells, reading: EngineReading) -> Told:
    """What a row says; Unclear where a cell holds no word that is known."""
    assumed: list[str] = []

    loss, chunks = _loss(cells)
    return Told(
        precision=_precision(cells, reading, assumed),
        covers=next(iter(meanings("covers", cells.words("precision"))), ""),
        weights=_weights(cells),
        gradients=_first(cells, "grad_dtype", "gradients"),
        optimizer=_optimizer(cells),
        recompute=_recompute(cells, reading, assumed),
        schedule=one_meaning(cells, "pp_schedule", "schedule"),
        layout=_layout(cells),
        attention=_attention(cells, reading),
        loss=loss or ("" if chunks else reading.loss),
        loss_chunks=chunks,
        allocator=one_meaning(cells, "allocator", "allocator"),
        compiled=cells.flag("compile"),
        flags=tuple(meanings("flags", cells.words("overlap_flags"))),
        offload=tuple(
            sorted(
                {
                    word
                    for column in ("shard_note", "overlap_flags")
                    for word in meanings("offload", cells.words(column))
                }
            )
        ),
        routing=one_meaning(cells, "moe_routing", "routing"),
        cp_comm=one_meaning(cells, "cp_comm", "cp_comm"),
        assumed=tuple(assumed),
    )


def _first(cells: Cells, column: str, topic: str) -> str:
    """The first meaning of a cell that has words enough, "" where it is blank."""
    text = cells.words(column)
    found = meanings(topic, text)
    if text and not found:
        raise Unclear(f"{column} is {cells.text(column)!r}, which names none that is known")
    return found[0] if found else ""


def _precision(cells: Cells, reading: EngineReading, assumed: list[str]) -> str:
    """The arithmetic that a cell names: of several words the one that says most, as MS-AMP's of "fp8 (MS-AMP ...)"."""
    text = cells.words("precision")
    if not text:
        raise Unclear("precision is blank: it says in how many bits weights and activations are")
    found = meanings("precision", text)
    if not found:
        raise Unclear(f"precision is {cells.text('precision')!r}, which names no arithmetic that is known")
    special = [word for word in found if word not in ("fp32", "fp16", "bf16", "fp8")]
    word = special[-1] if special else "fp8" if "fp8" in found else found[0]
    if word == "fp8" and reading.fp8:
        assumed.append(f"precision says fp8 alone: {reading.fp8}, the default of {reading.reason}")
        return reading.fp8
    return word


def _weights(cells: Cells) -> str:
    """Whether weights are kept without a copy in more bits, or in 8."""
    said = meanings("weights", f"{cells.words('param_dtype')} {cells.words('optimizer')}")
    if "pure" in said or _first(cells, "master_dtype", "master") == "none":
        return "pure"
    return "fp8" if "fp8" in said else ""


def _optimizer(cells: Cells) -> str:
    """The optimizer, adamw where none is named; of "adamw 8-bit" the word that says most."""
    text = cells.words("optimizer")
    found = meanings("optimizer", text)
    if text and not found:
        raise Unclear(f"optimizer is {cells.text('optimizer')!r}, which is none that is known")
    return next((word for word in found if word != "adamw"), "adamw")


def _recompute(cells: Cells, reading: EngineReading, assumed: list[str]) -> Recompute:
    how = one_meaning(cells, "recompute", "recompute")
    found = find("recompute_detail", cells.words("recompute_detail"))
    words = tuple(dict.fromkeys(phrase.meaning for phrase in found))
    if not how and not words:
        if not reading.recompute:
            raise Unclear("recompute is blank: it decides which activations are kept")
        how = reading.recompute
        assumed.append(f"recompute is blank: {how}, the default of {reading.reason}")
    if "unknown" in words:
        raise Unclear(f"recompute_detail is {cells.text('recompute_detail')!r}: it leaves open what is recomputed")
    if how == "none":
        return Recompute(how="none")
    if "all" in words or (how == "full" and not words):
        return Recompute(how="full")
    every = next((phrase.number for phrase in found if phrase.meaning == "layers"), None)
    if every is not None:
        return Recompute(how="full", every=0 if every == 1 else every)
    if "block" in words or "uniform" in words:
        return Recompute(how="full", blocks=_counted(cells) if "block" in words else 0)
    return Recompute(how="selective", parts=words)


def _counted(cells: Cells) -> int:
    """How many blocks of a stage are recomputed."""
    digits = [word for word in cells.words("recompute_detail").replace(",", " ").split() if word.isdigit()]
    if not digits:
        raise Unclear(f"recompute_detail is {cells.text('recompute_detail')!r}: it says not how many blocks")
    return int(digits[0])


def _layout(cells: Cells) -> str:
    """The words of a pipeline's layout, or its numbers as they stand."""
    text = cells.words("pp_layout")
    if text and all(part.isdigit() for part in text.replace(",", " ").split()):
        return text
    return one_meaning(cells, "pp_layout", "layout")


def _attention(cells: Cells, reading: EngineReading) -> str:
    flash = cells.flag("flash_attention")
    if flash is None:
        return reading.attention or "flash"
    return "flash" if flash else "eager"


def _loss(cells: Cells) -> tuple[str, int]:
    """(how, chunks) of the loss; of two ways that a cell leaves open none is taken."""
    text = cells.words("loss")
    found = meanings("loss", text)
    if text and not found:
        raise Unclear(f"loss is {cells.text('loss')!r}, which is no loss that is known")
    ways = [word for word in found if word not in ("chunked", "unchunked")]
    chunks = cells.whole("loss_chunks") or 0
    if "chunked" in found and not chunks:
        raise Unclear("loss is chunked and loss_chunks is blank: it says in how many parts")
    return ways[0] if len(ways) == 1 else "", chunks
