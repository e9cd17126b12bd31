"""How a measured run is laid out: the columns of its plan, its sequence and its batch, from the cells of its row."""

from __future__ import annotations

import dataclasses

from trainledger.arrays import ints
from trainledger.plans.limits import BATCH_LIMIT, SEQ_LIMIT
from trainledger.plans.plan import DEGREE_LIMIT
from trainledger.profiles import load_profile
from trainledger.scoring.cells import Cells
from trainledger.scoring.phrases import meanings, number_after
from trainledger.scoring.run_engine import EngineReading
from trainledger.scoring.words import Unclear

AXES = ("tp", "pp", "cp", "ep", "vpp")
SHARDS = {"zero1": 1, "zero2": 2, "zero3": 3}
_GROUP = r"shard group|dp_shard|shard size|degree|fsdp(?=\s*[= ])"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunLayout:
    """columns: of Plans; assumed: what was taken for granted where the row is silent."""

    columns: dict[str, int]
    seq: int
    gbs: int
    assumed: tuple[str, ...]


def layout_of(cells: Cells, reading: EngineReading) -> RunLayout:
    """The layout that a row states; Unclear where it leaves something open or contradicts itself."""
    assumed: list[str] = []
    degrees = {axis: _degree(cells, axis) or 1 for axis in AXES}
    dp = _data_parallel(cells, degrees)
    seq = cells.whole("seq_len")
    if seq is None:
        raise Unclear("seq_len is blank: activations are as long as the sequence")
    mbs, gbs = _batch(cells, degrees, dp, assumed)
    if cells.text("pp_microbatches") or (reading.pp_microbatches and degrees["pp"] > 1):
        mbs = _cut_by_pipeline(cells, degrees, gbs // dp, mbs, assumed)
    zero = _zero_stage(cells, reading, dp * degrees["cp"], assumed)
    _bounded(seq, gbs)
    columns = {
        **degrees,
        **_shards(cells, degrees, dp, zero),
        "sp": _sequence_parallel(cells, reading, degrees["tp"], assumed),
        "zero_stage": zero,
        "mbs": mbs,
        "num_microbatches": max(gbs // (mbs * dp), 1),
    }
    columns["etp"] = _degree(cells, "etp") or _expert_tp(reading, columns, dp, assumed)
    return RunLayout(columns=columns, seq=seq, gbs=gbs, assumed=tuple(assumed))


def _degree(cells: Cells, column: str) -> int | None:
    value = cells.whole(column)
    if value is not None and value > DEGREE_LIMIT:
        raise Unclear(f"{column} is {cells.text(column)}: at most {DEGREE_LIMIT} ranks are counted")
    return value


def _expert_tp(reading: EngineReading, columns: dict[str, int], dp: int, assumed: list[str]) -> int:
    """Tensor parallelism of routed experts as the engine takes it unasked; 1 where the ranks do not allow that."""
    tp, ep, ranks = columns["tp"], columns["ep"], columns["tp"] * columns["cp"] * dp
    profile = load_profile(reading.engine, reading.framework_version)
    etp = int(profile.default_etp(ints(tp), ints(ep))[0])
    if ep > 1 and ranks % (etp * ep) and not ranks % ep:
        assumed.append(f"etp is blank: 1, for the {ranks} ranks of a stage do not divide into etp x ep = {etp} x {ep}")
        return 1
    return etp


def _bounded(seq: int, gbs: int) -> None:
    for column, value, most in (("seq_len", seq, SEQ_LIMIT), ("gbs", gbs, BATCH_LIMIT)):
        if value > most:
            raise Unclear(f"{column} is {value}: at most {most} are counted")


def _data_parallel(cells: Cells, degrees: dict[str, int]) -> int:
    """The data-parallel degree, as stated or as the GPUs leave it; a degree that a row does not state is 1."""
    gpus, dp = _degree(cells, "num_gpus"), _degree(cells, "dp")
    rest = degrees["tp"] * degrees["pp"] * degrees["cp"]
    product = " x ".join(f"{axis}={degrees[axis]}" for axis in ("tp", "pp", "cp"))
    if dp is None:
        if gpus is None:
            raise Unclear("num_gpus and dp are blank: one of them says how many ranks share the states")
        if gpus % rest:
            raise Unclear(f"num_gpus is {gpus}, no multiple of {product}")
        return gpus // rest
    if gpus is not None and dp * rest != gpus:
        raise Unclear(f"num_gpus is {gpus}, and dp={dp} x {product} is {dp * rest}: they contradict each other")
    return dp


def _batch(cells: Cells, degrees: dict[str, int], dp: int, assumed: list[str]) -> tuple[int, int]:
    """(micro-batch, global batch) in sequences."""
    mbs, gbs, steps = (cells.whole(column) for column in ("mbs", "gbs", "grad_accum"))
    if mbs is None:
        share = dp * steps if steps else dp if gbs == dp else 0
        if not gbs or not share or gbs % share:
            raise Unclear("mbs is blank, and gbs, dp and grad_accum do not decide it")
        mbs = gbs // share
    if gbs is None and steps is None:
        steps = degrees["pp"] * degrees["vpp"]
        assumed.append(
            f"gbs is blank: {steps} micro-batches, as many as the pipeline has stages"
            if steps > 1
            else "gbs is blank: one micro-batch"
        )
    if gbs is None:
        gbs = mbs * dp * (steps or 1)
    elif steps is not None and gbs != mbs * dp * steps:
        raise Unclear(f"gbs is {gbs}, and mbs={mbs} x dp={dp} x grad_accum={steps} is {mbs * dp * steps}")
    return mbs, gbs


def _cut_by_pipeline(cells: Cells, degrees: dict[str, int], local: int, mbs: int, assumed: list[str]) -> int:
    """The micro-batch of a pipeline that cuts one rank's batch into a number of them."""
    stated = cells.whole("pp_microbatches")
    count = stated or degrees["pp"] * degrees["vpp"]
    if local % count or local // count == mbs:
        return mbs
    if not stated:
        assumed.append(f"{count} micro-batches of {local // count}: that release makes as many as there are stages")
    return local // count


def _zero_stage(cells: Cells, reading: EngineReading, ranks: int, assumed: list[str]) -> int:
    stated = cells.whole("zero_stage", 0)
    if stated is not None:
        if stated > max(SHARDS.values()):
            raise Unclear(f"zero_stage is {stated}: it lies between 0 and 3")
        return stated
    noted = [SHARDS[word] for word in meanings("sharding", cells.text("shard_note")) if word in SHARDS]
    if noted:
        return min(noted)
    if ranks == 1:
        return 0
    if reading.zero_stage is None:
        raise Unclear("zero_stage and shard_note are blank: they say which states are divided")
    assumed.append(f"zero_stage is blank: {reading.zero_stage}, the default of {reading.reason}")
    return reading.zero_stage


def _shards(cells: Cells, degrees: dict[str, int], dp: int, zero: int) -> dict[str, int]:
    """(dp_replicate, dp_shard): replicas of a group that divides its states, where the row speaks of them."""
    note = cells.text("shard_note")
    if zero == 0:
        return {"dp_replicate": 1, "dp_shard": dp}
    group = number_after(note, _GROUP)
    if group is None and "replicas" in meanings("sharding", note):
        node = cells.whole("gpus_per_node")
        if node is None:
            raise Unclear(f"shard_note is {note!r} and gpus_per_node is blank: it says how many ranks share the states")
        group = node // degrees["tp"]
    if group is None:
        return {"dp_replicate": 1, "dp_shard": dp}
    shard = max(min(group // degrees["cp"], dp), 1)
    if dp % shard:
        raise Unclear(f"shard_note is {note!r}, and groups of {shard} do not divide dp={dp}")
    return {"dp_replicate": dp // shard, "dp_shard": shard}


def _sequence_parallel(cells: Cells, reading: EngineReading, tp: int, assumed: list[str]) -> int:
    if tp == 1:
        return 0
    stated = cells.flag("sequence_parallel")
    if stated is not None:
        return int(stated)
    if reading.sequence_parallel is None:
        raise Unclear("sequence_parallel is blank with tp > 1: it says whether the residual stream is cut")
    word = "on" if reading.sequence_parallel else "off"
    assumed.append(f"sequence_parallel is blank: {word}, the default of {reading.reason}")
    return int(reading.sequence_parallel)
