"""`model`: the model as it was read, with every distinct tensor."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from trainledger.facts.model import Attention, Block, Mlp, Model, Moe, Ssm
from trainledger.facts.model import Tensor as ModelTensor
from trainledger.service.models import find_model
from trainledger.service.plan_file import overlay
from trainledger.service.requests import ModelRequest


class Request(ModelRequest, frozen=True, kw_only=True, rename="kebab"):
    """The model as read: family, total and active parameters, and every distinct tensor."""


class Tensor(msgspec.Struct, frozen=True, kw_only=True):
    """A distinct tensor: `*` stands for the layer and `{e}` for the expert.

    copies   tensors of this shape in one layer; layers: how many layers have it
    params   elements of all of them
    """

    name: str
    role: str
    shape: tuple[int, ...]
    copies: int
    layers: int
    params: int
    share: float


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """A distinct kind of block, and the layers that use it; params are those of one layer."""

    kind: str
    num_layers: int
    layers: tuple[int, ...]
    params: int
    norms: int
    parallel: bool
    attention: Attention | None
    mlp: Mlp | None
    moe: Moe | None
    ssm: Ssm | None


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """The model. mtp_params are those of all multi-token-prediction layers, not part of total_params."""

    name: str
    family: str
    total_params: int
    active_params: int
    hidden_size: int
    num_layers: int
    vocab_size: int
    max_positions: int | None
    tied: bool
    params_only: bool
    blocks: tuple[Layer, ...]
    tensors: tuple[Tensor, ...]
    mtp_params: int
    notes: tuple[str, ...]
    source: str

    @property
    def exit_code(self) -> int:
        """A model that was read is an answer."""
        return 0


def run(request: Request) -> Response:
    """Read the model."""
    model = find_model(overlay(request))
    return Response(
        name=model.name,
        family=model.family,
        total_params=model.total_params,
        active_params=model.active_params,
        hidden_size=model.hidden_size,
        num_layers=model.num_layers,
        vocab_size=model.vocab_size,
        max_positions=model.max_positions,
        tied=model.tied,
        params_only=model.params_only,
        blocks=tuple(_layer(block) for block in model.blocks),
        tensors=tuple(_tensors(model)),
        mtp_params=model.mtp.numel * model.mtp_depths if model.mtp is not None else 0,
        notes=model.notes,
        source=model.source,
    )


def _layer(block: Block) -> Layer:
    return Layer(
        kind=block.kind,
        num_layers=len(block.layers),
        layers=block.layers,
        params=block.numel,
        norms=block.norms,
        parallel=block.parallel,
        attention=block.attention,
        mlp=block.mlp,
        moe=block.moe,
        ssm=block.ssm,
    )


def _tensors(model: Model) -> Iterable[Tensor]:
    yield from (_tensor(tensor, "", 1, model) for tensor in model.embedding)
    prefix = model.layer_prefix.replace("{i}", "*")
    for block in model.blocks:
        yield from (_tensor(tensor, prefix, len(block.layers), model) for tensor in block.tensors)
    yield from (_tensor(tensor, "", 1, model) for tensor in model.final)


def _tensor(tensor: ModelTensor, prefix: str, layers: int, model: Model) -> Tensor:
    params = tensor.numel * tensor.copies * layers
    return Tensor(
        name=prefix + tensor.name,
        role=tensor.role,
        shape=tensor.shape,
        copies=tensor.copies,
        layers=layers,
        params=params,
        share=params / model.total_params,
    )
