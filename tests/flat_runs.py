"""What PyTorch's FSDP of flat parameters has alive on one of several ranks, of which the others are fake."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainledger.facts.model_load import load_with_config
from trainledger.runtime.model import build_decoder, init_weights
from trainledger.runtime.model.block import Block
from trainledger.runtime.observe.clock import Clock
from trainledger.runtime.observe.collectives import CollectiveCounter
from trainledger.runtime.observe.dispatch import watching
from trainledger.runtime.observe.storages import StorageTracker

RANKS, SEQ = 4, 16
SIZES: dict[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 4,
}
Case = tuple[int, str, bool, int, int]
"""zero_stage, dtype of reductions ("": no mixed precision), tied or not, micro-batches, vocabulary."""
Found = tuple[int, int, dict[str, tuple[int, int]]]
"""Most bytes alive in a step, bytes between steps, and calls and bytes handed over by operation."""


def overrides(case: Case) -> dict[str, object]:
    """The sizes of the model of a case."""
    return {**SIZES, "tie_word_embeddings": case[2], "vocab_size": case[4]}


def measured(_rank: int, cases: list[Case]) -> list[Found]:
    """Of each case; to be run in a process of its own, whose process group is replaced."""
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    return [_measured(case) for case in cases]


def _measured(case: Case) -> Found:
    clock = Clock(None)
    storages, calls = StorageTracker(clock), CollectiveCounter({}, clock)
    with storages.following_resizes(), watching(storages) as mode:
        model, optimizer = _wrapped(case)
        _step(model, optimizer, case)
        storages.mark()
        mode.watchers = (storages, calls)
        rest = storages.current_bytes
        _step(model, optimizer, case)
        storages.bury()
    sent: dict[str, tuple[int, int]] = {}
    for call in calls.calls():
        count, amount = sent.get(call.op, (0, 0))
        sent[call.op] = count + call.count, amount + call.in_bytes
    return storages.peak_bytes, rest, sent


def _wrapped(case: Case) -> tuple[FullyShardedDataParallel, torch.optim.Optimizer]:
    config, facts = load_with_config("llama-3-8b", overrides={k: str(v).lower() for k, v in overrides(case).items()})
    decoder = build_decoder(facts, config)
    init_weights(decoder, 0)
    how: dict[str, Any] = {}
    if case[1]:
        reduce = getattr(torch, case[1])
        how["mixed_precision"] = MixedPrecision(torch.bfloat16, reduce_dtype=reduce, buffer_dtype=torch.bfloat16)
    model = FullyShardedDataParallel(
        decoder,
        sharding_strategy=ShardingStrategy.FULL_SHARD if case[0] == 3 else ShardingStrategy.SHARD_GRAD_OP,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
        **how,
    )
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def _step(model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer, case: Case) -> None:
    batches, vocabulary = case[3], case[4]
    for index in range(batches):
        with nullcontext() if index == batches - 1 else model.no_sync():
            tokens, labels = torch.randint(vocabulary, (1, SEQ)), torch.randint(vocabulary, (SEQ,))
            logits = model(tokens)
            loss = functional.cross_entropy(logits.view(-1, vocabulary).float(), labels)
            del logits
            loss.backward()
    optimizer.step()
    optimizer.zero_grad()
