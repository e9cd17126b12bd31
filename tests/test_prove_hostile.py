"""A proof under attack: whatever one rank does otherwise turns the verdict, and nothing hides from the observers."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from fake_runs import Fake, as_seen, predicted
from trainledger.account.rank import Prediction
from trainledger.errors import BadInput, Refused
from trainledger.facts.model_load import load_with_config
from trainledger.reconcile.proof import Pair, proof
from trainledger.runtime.model.read import read_semantics
from trainledger.runtime.observe import held
from trainledger.runtime.observe.observation import Call, Held, Observation, Unclaimed
from trainledger.runtime.observe.observer import Observer
from trainledger.runtime.observe.strangers import UNSEEN
from trainledger.runtime.spec import RunSpec
from trainledger.service import prove
from trainledger.service.prove_launch import How, Progress
from trainledger.service.prove_plan import planned

PLANS: dict[str, dict[str, Any]] = {
    "ddp": {"model": "llama-3-8b", "dp": 2},
    "zero 3": {"model": "gpt2", "dp": 2, "zero": 3, "precision": "bf16"},
    "replicas": {"model": "llama-3-8b", "dp_replicate": 2, "dp_shard": 2, "zero": 2},
    "tensors": {"model": "llama-3-8b", "tp": 2, "zero": 0},
    "pipeline": {"model": "qwen2.5-0.5b", "pp": 2, "dp": 2, "zero": 1},
    "context": {"model": "llama-3-8b", "cp": 2, "zero": 3},
    "experts": {"model": "mixtral-8x7b", "dp": 2, "ep": 2, "zero": 1},
    "experts, recomputed": {"model": "deepseek-v3", "dp": 2, "ep": 2, "recompute": "full", "precision": "bf16"},
}
STORAGE = Unclaimed(bytes=4, dtype="fp32", shape=(1,), op="aten::zeros", phase="backward")


@pytest.fixture(scope="module", params=PLANS)
def pairs(request: pytest.FixtureRequest) -> list[Pair]:
    spec = planned(prove.Request(**PLANS[request.param])).spec
    return [(prediction, as_seen(prediction, spec)) for prediction in predicted(spec)]


def one_of_a_kind(names: Sequence[str]) -> list[str]:
    """The first line of every category."""
    kinds: dict[str, str] = {}
    for name in names:
        kinds.setdefault("/".join(name.split("/")[:2]) + name.partition(":")[2], name)
    return list(kinds.values())


def numbers(of: dict[str, int]) -> Iterator[dict[str, int]]:
    """The same figures but one: larger, smaller, gone; and one more."""
    for name in one_of_a_kind(list(of)):
        yield {**of, name: of[name] + 1}
        yield {**of, name: of[name] - 1}
        yield {other: of[other] for other in of if other != name}
    yield {**of, "held/buffers/of nobody": 4}


def holdings(seen: Observation) -> Iterator[tuple[Held, ...]]:
    """What is held, otherwise at one instant; after the loss activations are under no name, and reported."""
    for index, at in enumerate(seen.held):
        others = [*seen.held[:index]], [*seen.held[index + 1 :]]
        claimed = [msgspec.structs.replace(at, claimed=other) for other in numbers(at.claimed)]
        lost = [msgspec.structs.replace(at, unclaimed=(STORAGE,))] if at.instant != "loss" else []
        yield (*others[0], *others[1])
        yield from ((*others[0], changed, *others[1]) for changed in (*claimed, *lost))


def sendings(seen: Observation) -> Iterator[tuple[Call, ...]]:
    """What is sent, otherwise in one kind of collective."""
    for index, call in enumerate(seen.calls):
        changes: list[dict[str, Any]] = [
            {"count": call.count + 1},
            {"count": call.count - 1},
            {"in_bytes": call.in_bytes + 1},
            {"out_bytes": call.out_bytes + 1},
            {"in_bytes": 2 * call.in_bytes + 1, "out_bytes": 2 * call.out_bytes + 1},
            {"op": "broadcast"},
            {"group": "0"},
            {"dtype": "fp16"},
        ]
        yield (*seen.calls[:index], *seen.calls[index + 1 :])
        for change in changes:
            yield (*seen.calls[:index], msgspec.structs.replace(call, **change), *seen.calls[index + 1 :])


def otherwise(seen: Observation) -> Iterator[Observation]:
    """The same run with one thing changed."""
    yield from (msgspec.structs.replace(seen, held=other) for other in holdings(seen))
    yield from (msgspec.structs.replace(seen, calls=calls) for calls in sendings(seen))
    yield from (msgspec.structs.replace(seen, flop=flop) for flop in numbers(seen.flop))
    yield from (msgspec.structs.replace(seen, gathered=found) for found in numbers(seen.gathered))
    for index, group in enumerate(seen.groups):
        for change in ({"ranks": (*group.ranks, 99)}, {"ranks": (*group.ranks[1:], 99)}, {"issued": group.seen + 1}):
            changed = msgspec.structs.replace(group, **change)
            yield msgspec.structs.replace(seen, groups=(*seen.groups[:index], changed, *seen.groups[index + 1 :]))


def test_whatever_one_rank_does_otherwise_turns_the_verdict(pairs: list[Pair]) -> None:
    assert proof(pairs).verdict == "proven"
    prediction, seen = pairs[-1]
    changes = list(otherwise(seen))
    assert len(changes) > 50
    for changed in changes:
        fields = [name for name in seen.__struct_fields__ if getattr(changed, name) != getattr(seen, name)]
        found = proof([*pairs[:-1], (prediction, changed)])
        assert found.verdict == "differs", [(name, getattr(changed, name)) for name in fields]


def both(pairs: list[Pair], change: Callable[[Observation], Observation]) -> list[Pair]:
    return [(prediction, change(seen)) for prediction, seen in pairs]


@pytest.mark.parametrize("pairs", ["experts", "experts, recomputed"], indirect=True)
def test_tokens_that_all_ranks_send_twice_are_not_conserved(pairs: list[Pair]) -> None:
    """What is got is what was passed in, and no rank's bytes are predicted exactly; their sum is."""

    def twice(seen: Observation) -> Observation:
        routed = [call for call in seen.calls if call.group == "ep" and call.dtype != "int64"]
        assert routed
        calls = tuple(
            msgspec.structs.replace(call, in_bytes=2 * call.in_bytes, out_bytes=2 * call.out_bytes)
            if call in routed
            else call
            for call in seen.calls
        )
        return msgspec.structs.replace(seen, calls=calls)

    found = proof(both(pairs, twice))
    wrong = [line for line in found.lines if line.verdict == "differs"]
    assert [line.id.partition(":")[2] for line in wrong] == ["conserved@ep"]
    assert wrong[0].measured == 2 * (wrong[0].predicted or 0)


@pytest.mark.parametrize("pairs", ["experts", "experts, recomputed"], indirect=True)
def test_experts_that_compute_twice_are_seen_over_their_group(pairs: list[Pair]) -> None:
    def more(seen: Observation) -> Observation:
        return msgspec.structs.replace(seen, flop={**seen.flop, "grouped_matmul": 2 * seen.flop["grouped_matmul"]})

    def moved(seen: Observation) -> Observation:
        """From one rank's experts to the other's, as a router may."""
        by = 4096 if seen.rank == 0 else -4096
        return msgspec.structs.replace(seen, flop={**seen.flop, "grouped_matmul": seen.flop["grouped_matmul"] + by})

    assert proof(both(pairs, moved)).verdict == "proven"
    wrong = [line.id for line in proof(both(pairs, more)).lines if line.verdict == "differs"]
    assert wrong == ["done/grouped_matmul:conserved@ep"]


@pytest.mark.parametrize("spoilt", ["rank", "order", "digest"])
def test_what_other_ranks_or_another_run_saw_proves_nothing(spoilt: str) -> None:
    def runner(spec: RunSpec, how: How, progress: Progress | None) -> Sequence[Observation]:
        seen = list(Fake()(spec, how, progress))
        if spoilt == "rank":
            return seen[:-1]
        if spoilt == "order":
            return seen[::-1]
        return [seen[0], msgspec.structs.replace(seen[1], digest="of another run")]

    with pytest.raises(AssertionError):
        prove.run(prove.Request(model="llama-3-8b", dp=2), runner=runner)


def in_another_thread(work: Callable[..., object], *given: object) -> None:
    thread = threading.Thread(target=work, args=given)
    thread.start()
    thread.join()


def test_a_tensor_that_no_operation_was_seen_to_make_is_unclaimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "PATIENCE_S", dict.fromkeys(held.PATIENCE_S, 0.0))
    kept: list[torch.Tensor] = [torch.ones(1)]
    observer = Observer({})
    with observer.watching(), observer.observing():
        in_another_thread(lambda: kept.append(torch.zeros(256)))
        kept.append(torch.frombuffer(bytearray(64), dtype=torch.float32))
        for instant in ("loss", "backward", "rest"):
            observer.instant(instant, [])
        del kept[:]
    loss, backward, rest = observer.result(0, "", []).held
    assert [(one.op, one.bytes, one.shape) for one in rest.unclaimed] == [(UNSEEN, 1024, (256,)), (UNSEEN, 64, (16,))]
    assert (backward.unclaimed == rest.unclaimed, loss.unclaimed) == (True, ())


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    """A world of this process; no server of ranks has to load torch first, which takes a busy machine a minute."""
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]  # documented
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    yield group
    dist.destroy_process_group()


def test_a_collective_of_another_thread_is_missed_by_number(alone: dist.ProcessGroup) -> None:
    value = torch.ones(4)
    observer = Observer({alone.group_name: "world"})
    with observer.watching(), observer.observing():
        dist.all_reduce(value)
        in_another_thread(dist.all_reduce, value)
    seen = observer.result(0, "", [])
    (group,) = seen.groups
    assert (group.name, group.ranks, group.seen, group.issued) == ("world", (0,), 1, 2)
    nothing = Prediction(rank=0, pp_stage=0, held={}, calls=(), flop={}, gathered={})
    (item,) = proof([(nothing, seen)]).unexplained.items
    assert (item.op, item.times) == ("unseen@world", 1)


CUSTOM: dict[str, Any] = {"model": "custom", "hidden": 64, "layers": 2, "heads": 4, "ffn": 96, "vocab": 256, "seq": 32}
NO_FORWARD: dict[str, tuple[dict[str, Any], str]] = {
    "an odd head": ({**CUSTOM, "hidden": 60}, "15 features of a head turn with the position, and they turn in pairs"),
    "a head of one": ({**CUSTOM, "hidden": 4}, "1 features of a head"),
    "no base": ({"model": "llama-3-8b", "set": ("rope_theta=0",)}, "rope_theta is 0.0"),
    "no group": ({"model": "deepseek-v3", "set": ("n_group=0",)}, "n_group=0 groups"),
    "uneven groups": ({"model": "deepseek-v3", "set": ("n_group=3",)}, "n_group=3 groups"),
    "too few groups": ({"model": "deepseek-v3", "set": ("topk_group=9",)}, "topk_group=9"),
    "of no group": ({"model": "deepseek-v3", "set": ("topk_group=-1",)}, "topk_group=-1"),
}


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*given: object) -> Sequence[Observation]:
        raise AssertionError(given)

    monkeypatch.setattr(prove, "launch", never)


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("name", NO_FORWARD)
def test_a_config_without_a_forward_pass_is_refused_before_there_are_ranks(name: str) -> None:
    given, said = NO_FORWARD[name]
    with pytest.raises(Refused, match=rf"^\[runtime-config\] .*{said}"):
        prove.run(prove.Request(**given))


@pytest.mark.usefixtures("nothing_starts")
def test_a_number_that_is_none_is_refused(tmp_path: Path) -> None:
    config = planned(prove.Request(**CUSTOM)).spec.config
    (tmp_path / "config.json").write_text(json.dumps({**config, "rms_norm_eps": math.nan}), encoding="utf-8")
    with pytest.raises(BadInput, match="rms_norm_eps is nan"):
        prove.run(prove.Request(model=str(tmp_path), seq=32))


def test_keys_of_a_router_are_idle_where_no_layer_routes() -> None:
    config, model = load_with_config("deepseek-v3", overrides={"num_hidden_layers": "1"})
    assert config["n_group"] == 8
    assert read_semantics(model, config).moe is None
