"""What PyTorch's FSDP of flat parameters has alive on one of several ranks, of which the others are fake.

Adapters stand beside frozen weights in 16 bits as peft puts them, and are wrapped by its policy: a decoder layer, and
inside it each module without children whose weight trains. [peft: utils/other.py fsdp_auto_wrap_policy]
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

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
TARGETS = ("q_proj", "v_proj")
Case = tuple[int, str, bool, int, int, int]
"""zero_stage, dtype of reductions ("": no mixed precision), tied or not, micro-batches, vocabulary, adapters' rank."""
Found = tuple[int, int, dict[str, tuple[int, int]]]
"""Most bytes alive in a step, bytes between steps, and calls and bytes handed over by operation."""


def overrides(case: Case) -> dict[str, object]:
    """The sizes of the model of a case."""
    return {**SIZES, "tie_word_embeddings": case[2], "vocab_size": case[4]}


class Adapted(nn.Module):
    """A frozen matrix and a low rank beside it. [peft: tuners/lora/layer.py Linear]"""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """X [tokens, in] to [tokens, out]."""
        result = self.base(x)
        return result + self.lora_b(self.lora_a(x)) * 2.0


class Again(nn.Module):
    """A wrapped block behind a reentrant checkpoint, as gradient_checkpointing_enable puts it."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *given: Any) -> Tensor:  # noqa: ANN401 - what a block is given
        """Run the block, and again before its backward."""
        return checkpoint(self.block, *given, use_reentrant=True)


def kept_by_depth(_rank: int, depths: list[int]) -> list[int]:
    """Most bytes alive in a step with adapters behind reentrant checkpoints, for numbers of layers."""
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    return [_kept_again(depth) for depth in depths]


def _kept_again(depth: int) -> int:
    case: Case = (3, "bfloat16", False, 1, 300, 2)
    clock = Clock(None)
    storages = StorageTracker(clock)
    with storages.following_resizes(), watching(storages):
        model, optimizer = _wrapped(case, depth)
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, FullyShardedDataParallel) and isinstance(child.module, Block):
                    setattr(parent, name, Again(child))
        embedding = next(module for module in model.modules() if isinstance(module, nn.Embedding))
        embedding.register_forward_hook(lambda _module, _given, out: out.requires_grad_())
        rest = 0
        for _ in range(2):
            storages.mark()
            rest = storages.current_bytes
            _step(model, optimizer, case)
    return storages.peak_bytes - rest


class WithLoss(nn.Module):
    """A model that gives its loss, so that its backward begins inside the root."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy in fp32."""
        logits = self.decoder(tokens)
        return functional.cross_entropy(logits.view(labels.numel(), -1).float(), labels)


def _adapt(decoder: nn.Module, rank: int, frozen: torch.dtype) -> None:
    """Freeze what is there, in the dtype of the model's products, and put adapters beside it."""
    decoder.to(frozen).requires_grad_(requires_grad=False)
    for block in [module for module in decoder.modules() if isinstance(module, Block)]:
        for name, module in list(block.named_modules()):
            if name.rsplit(".", 1)[-1] in TARGETS and isinstance(module, nn.Linear):
                parent, last = name.rsplit(".", 1)
                setattr(block.get_submodule(parent), last, Adapted(module, rank))


def _policy(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    leaf = not list(module.children()) and weight is not None and weight.requires_grad
    return isinstance(module, Block) or leaf


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


def _wrapped(case: Case, layers: int = 4) -> tuple[FullyShardedDataParallel, torch.optim.Optimizer]:
    sizes = {**overrides(case), "num_hidden_layers": layers}
    config, facts = load_with_config("llama-3-8b", overrides={k: str(v).lower() for k, v in sizes.items()})
    decoder = build_decoder(facts, config)
    init_weights(decoder, 0)
    if case[5]:
        _adapt(decoder, case[5], torch.bfloat16 if case[1] else torch.float32)
    how: dict[str, Any] = {}
    if case[1]:
        reduce = getattr(torch, case[1])
        how["mixed_precision"] = MixedPrecision(torch.bfloat16, reduce_dtype=reduce, buffer_dtype=torch.bfloat16)
    model = FullyShardedDataParallel(
        WithLoss(decoder),
        sharding_strategy=ShardingStrategy.FULL_SHARD if case[0] == 3 else ShardingStrategy.SHARD_GRAD_OP,
        auto_wrap_policy=CustomPolicy(_policy) if case[5] else ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
        **how,
    )
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)


def _step(model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer, case: Case) -> None:
    batches, vocabulary = case[3:5]
    for index in range(batches):
        with nullcontext() if index == batches - 1 else model.no_sync():
            tokens, labels = torch.randint(vocabulary, (1, SEQ)), torch.randint(vocabulary, (SEQ,))
            model(tokens, labels).backward()
    optimizer.step()
    optimizer.zero_grad()
