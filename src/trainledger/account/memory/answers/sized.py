"""An amount of bytes as tokens x width x bytes an element, where it is that: how a storage's size is said in words."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Literal

import msgspec

from trainledger.dtypes import bits
from trainledger.facts.model import Attention, Mlp, Moe, Ssm
from trainledger.inventory.blocks.sizes import Sizes
from trainledger.inventory.inventory import Inventory
from trainledger.plans.plan import Plans

DTYPES = ("bf16", "fp32", "uint8", "int64")


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """An amount in words; per_token: bytes for each token of a micro-batch on one rank."""

    amount: int
    family: Literal["logits", "scores", "activations"]
    formula: str
    per_token: int


class Widths:
    """The widths of tensors of one plan: elements a token on one rank, by name."""

    def __init__(self, inventory: Inventory, plans: Plans) -> None:
        self.inventory = inventory
        self.sizes = Sizes(inventory.setting, plans)
        self.tokens = int(self.sizes.tokens[0])
        self.tp = int(plans.tp[0])
        self.activation = inventory.setting.recipe.activation

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """Of the logits, as the engine pads them."""
        cut = int(self.sizes.logits("uint8")[0]) // self.tokens
        whole = int(self.sizes.logits("uint8", cut=False)[0]) // self.tokens
        return {"vocabulary": cut} if cut == whole else {f"vocabulary / {self.tp}": cut, "vocabulary": whole}

    @cached_property
    def heads(self) -> tuple[int, ...]:
        """Query heads of a rank, in each kind of layer that has them."""
        found = [block.attention for _, block in self.inventory.layers if block.attention is not None]
        return tuple(dict.fromkeys(int(self.sizes.heads(attention)[0]) for attention in found))

    @cached_property
    def named(self) -> dict[str, int]:
        """Every width of a layer, the widest meaning first where two are equal."""
        hidden, over = self.sizes.hidden_size, "" if self.tp == 1 else f" / {self.tp}"
        found = {"hidden": hidden, f"hidden{over}": -(-hidden // self.tp)}
        for _, block in self.inventory.layers:
            for part in (block.attention, block.mlp, block.moe, block.ssm):
                if part is not None:
                    found.update(self._of(part, over))
        return {name: width for name, width in found.items() if width > 1}

    def _of(self, part: Attention | Mlp | Moe | Ssm, over: str) -> Iterator[tuple[str, int]]:
        tp = self.tp
        match part:
            case Attention():
                queries, keys = (int(count[0]) for count in (self.sizes.heads(part), self.sizes.kv_heads(part)))
                yield f"query heads{over} x {part.qk_head_dim}", queries * part.qk_head_dim
                yield f"KV heads{over} x {part.qk_head_dim}", keys * part.qk_head_dim
                yield f"q, k and v{over}", queries * part.qk_head_dim + keys * (part.qk_head_dim + part.v_head_dim)
                yield f"query heads{over}", queries
            case Mlp():
                yield f"feed-forward width{over}", -(-part.intermediate // tp)
                yield f"2 x feed-forward width{over}", -(-2 * part.intermediate // tp)
            case Moe():
                yield f"{part.top_k} experts x hidden", part.top_k * self.sizes.hidden_size
                yield f"{part.top_k} experts x their width", part.top_k * part.intermediate
                yield f"2 x {part.top_k} experts x their width", 2 * part.top_k * part.intermediate
                yield "experts", part.experts
            case Ssm():
                yield f"SSM heads x their size{over}", -(-part.heads * part.head_dim // tp)

    def said(self, amount: int) -> Said | None:
        """The amount in words; None where it is no product of tokens and a width."""
        if not amount or amount % self.tokens:
            return None
        per_token = amount // self.tokens
        for said, _ in (*self.logits(), *self.scores()):
            if said.amount == amount:
                return said
        for dtype in (self.activation, *DTYPES):
            each = bits(dtype) // 8
            for name, width in self.named.items():
                if per_token == width * each:
                    return self._said("activations", f"{width} {name}", each, per_token)
        return Said(
            amount=amount,
            family="activations",
            formula=f"{self.tokens} tokens x {per_token} B",
            per_token=per_token,
        )

    def logits(self) -> Iterator[tuple[Said, str]]:
        """The logits of a micro-batch with the dtype that they would have, the rank's part first."""
        for name, width in self.vocabulary.items():
            for dtype in dict.fromkeys((self.activation, "fp32")):
                each = bits(dtype) // 8
                yield self._said("logits", f"{width} {name}", each, width * each), dtype

    def scores(self) -> Iterator[tuple[Said, str]]:
        """The attention scores of a layer, where they are materialised."""
        seq = self.inventory.setting.workload.seq
        for heads in self.heads:
            for dtype in dict.fromkeys((self.activation, "fp32", "uint8")):
                each = bits(dtype) // 8
                yield self._said("scores", f"{seq} keys x {heads} heads", each, seq * heads * each), dtype

    def _said(self, family: Literal["logits", "scores", "activations"], width: str, each: int, per_token: int) -> Said:
        return Said(
            amount=self.tokens * per_token,
            family=family,
            formula=f"{self.tokens} tokens x {width} x {each} B",
            per_token=per_token,
        )
