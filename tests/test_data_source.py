"""What ranks read: in every layout the same sequences a step, and the same ones after a pause."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_files import spec_of, token_file
from trainledger.plans.ranks import place_of, world_size
from trainledger.runtime.batch import Batch
from trainledger.runtime.data.source import Position, Tokens
from trainledger.runtime.data.token_file import TokenFile
from trainledger.runtime.spec import RunSpec

SEQ, SEQUENCES, SEED = 4, 53, 5
GBS = 12
ALONE = {"mbs": GBS, "num_microbatches": 1}
SPEC = spec_of(seq=SEQ, vocab_size=1000, seed=SEED, plan={})


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> TokenFile:
    """Tokens that say where they stand: token i is i."""
    return token_file(tmp_path_factory.mktemp("data") / "it.tokens", range(SEQ * SEQUENCES + 1), vocab_size=1000)


@st.composite
def layouts(draw: st.DrawFn) -> dict[str, int]:
    """Plans of one global batch: every axis that a job may have, and the batch shared out in any way."""
    replicas = draw(st.sampled_from([1, 2, 3, 4, 6, 12]))
    mbs = draw(st.sampled_from([size for size in (1, 2, 3, 4, 6, 12) if GBS // replicas % size == 0]))
    replicate = draw(st.sampled_from([size for size in (1, 2, 3, 4, 6, 12) if replicas % size == 0]))
    axes = {axis: draw(st.sampled_from([1, 2])) for axis in ("tp", "pp", "cp")}
    shared = {"dp_replicate": replicate, "dp_shard": replicas // replicate}
    return {**axes, **shared, "mbs": mbs, "num_microbatches": GBS // replicas // mbs}


def sources(file: TokenFile, spec: RunSpec, start: Position | None = None) -> list[tuple[int, Tokens]]:
    """(replica, source) of every rank."""
    places = [place_of(spec.plan, rank) for rank in range(world_size(spec.plan))]
    return [(at.dp_replicate * spec.plan["dp_shard"] + at.dp_shard, Tokens(file, spec, at, start)) for at in places]


def joined(batches: list[Batch]) -> torch.Tensor:
    return torch.cat([torch.cat((tokens, labels[:, -1:]), dim=1) for tokens, labels in batches])


def global_rows(file: TokenFile, plan: dict[str, int], step: int, start: Position | None = None) -> list[list[int]]:
    """What a job reads in a step, sequence by sequence, once its ranks are seen to agree."""
    spec = msgspec.structs.replace(SPEC, plan={**SPEC.plan, **plan})
    replicas: dict[int, list[list[int]]] = {}
    for replica, source in sources(file, spec, start):
        batches = source(step)
        assert [tuple(part.shape) for batch in batches for part in batch] == [(plan["mbs"], SEQ)] * (2 * len(batches))
        assert len(batches) == plan["num_microbatches"]
        rows = joined(batches).tolist()
        assert replicas.setdefault(replica, rows) == rows, "ranks of one replica read the same"
    return [row for replica in sorted(replicas) for row in replicas[replica]]


@given(plan=layouts(), step=st.integers(0, 1000))
@settings(max_examples=50)
def test_all_ranks_of_a_layout_read_the_batch_that_one_process_reads(
    file: TokenFile, plan: dict[str, int], step: int
) -> None:
    assert global_rows(file, plan, step) == global_rows(file, ALONE, step)


@given(plan=layouts(), stop=st.integers(0, 40))
@settings(max_examples=30)
def test_a_run_goes_on_in_another_layout_where_it_stopped(file: TokenFile, plan: dict[str, int], stop: int) -> None:
    start = Position(step=stop, sequences=stop * GBS)
    for step in range(stop, stop + 3):
        assert global_rows(file, plan, step, start) == global_rows(file, ALONE, step)


def test_a_run_goes_on_with_another_batch_without_a_gap(file: TokenFile) -> None:
    """Twenty steps of 12, then of 6 from there on: twice as many, and the same sequences in the same order."""
    start, half = Position(step=20, sequences=20 * GBS), {"mbs": 6, "num_microbatches": 1}
    went_on = [row for step in range(20, 40) for row in global_rows(file, half, step, start)]
    assert went_on == [row for step in range(20, 30) for row in global_rows(file, ALONE, step)]


def test_an_epoch_has_every_sequence_once_and_runs_on_into_the_next(file: TokenFile) -> None:
    steps = -(-2 * SEQUENCES // GBS)
    rows = [row for step in range(steps) for row in global_rows(file, ALONE, step)]
    every = sorted([*range(first, first + SEQ + 1)] for first in range(0, SEQ * SEQUENCES, SEQ))
    assert sorted(rows[:SEQUENCES]) == sorted(rows[SEQUENCES : 2 * SEQUENCES]) == every
    assert rows[:SEQUENCES] != rows[SEQUENCES : 2 * SEQUENCES]


def test_a_label_is_the_token_that_follows(file: TokenFile) -> None:
    spec = spec_of(seq=SEQ, vocab_size=1000, plan={"mbs": 2})
    for tokens, labels in Tokens(file, spec, place_of(spec.plan, 0))(3):
        assert tokens.dtype == labels.dtype == torch.int64
        assert torch.equal(tokens + 1, labels)


def test_a_file_larger_than_memory_is_read_where_it_is_looked_at(tmp_path: Path) -> None:
    """A sparse file of 128 GiB, of which a step far on reads four sequences."""
    small, more, seq = token_file(tmp_path / "large.tokens", np.arange(9)), 1 << 36, 1 << 12
    with small.path.open("r+b") as whole:
        whole.truncate(whole.seek(0, 2) + 2 * more)
    large = msgspec.structs.replace(small, facts=msgspec.structs.replace(small.facts, count=9 + more))
    spec = spec_of(seq=seq, plan={"mbs": 4})
    ((tokens, labels),) = Tokens(large, spec, place_of(spec.plan, 0))(10**6)
    assert tuple(tokens.shape) == tuple(labels.shape) == (4, seq)
