"""Models without a config: from a few sizes, from a parameter count, or from a module that has been built."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from trainledger.errors import BadInput
from trainledger.facts.families import assembled, check_size
from trainledger.facts.families.common import Heads, attention, embedding, gated_mlp, head, norm, plain_mlp
from trainledger.facts.families.keys import DIM_LIMIT, LAYER_LIMIT, Parts, shown
from trainledger.facts.model import Block, Mlp, Model, Tensor


class Module(Protocol):
    """What `from_module` asks of a module: torch.nn.Module has it."""

    def named_parameters(self) -> Iterable[tuple[str, Any]]:
        """Pairs of name and parameter, each parameter once however many names it has."""
        ...


def _whole(name: str, value: object, at_most: int = DIM_LIMIT) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= at_most:
        limit = "2**62" if at_most == DIM_LIMIT else str(at_most)
        raise BadInput(f"{name} is {shown(value)}; it takes a whole number from 1 to {limit}; give another {name}")
    return value


def _model(parts: Parts, *, name: str, source: str, notes: tuple[str, ...] = (), params_only: bool = False) -> Model:
    check_size(parts, name)
    return assembled(parts, name=name, family="custom", source=source, notes=notes, params_only=params_only)


def _heads(hidden: int, heads: int, kv_heads: int | None) -> Heads:
    heads = _whole("heads", heads)
    kv_heads = heads if kv_heads is None else _whole("kv_heads", kv_heads)
    if hidden % heads:
        raise BadInput(f"heads is {heads}; it must divide hidden={hidden}; give a divisor of {hidden}")
    if heads % kv_heads:
        raise BadInput(f"kv_heads is {kv_heads}; it must divide heads={heads}; give a divisor of {heads}")
    return Heads(hidden, heads, kv_heads, hidden // heads)


def model_by_hand(
    *,
    hidden: int,
    layers: int,
    heads: int,
    ffn: int,
    vocab: int,
    kv_heads: int | None = None,
    tied: bool = False,
    gated: bool = True,
    name: str = "custom",
) -> Model:
    """A model of Llama's shape from its sizes: RMSNorms, no biases, rotary embeddings, so no bound on positions.

    Without `kv_heads` each head has its own k and v; with `gated=False` the network has two matrices instead of three.

    >>> model_by_hand(hidden=4096, layers=32, heads=32, kv_heads=8, ffn=14336, vocab=128256).total_params
    8030261248
    """
    hidden, ffn, vocab = _whole("hidden", hidden), _whole("ffn", ffn), _whole("vocab", vocab)
    layers, sizes = _whole("layers", layers, LAYER_LIMIT), _heads(hidden, heads, kv_heads)
    network = gated_mlp("mlp", hidden, ffn) if gated else plain_mlp("mlp.up_proj", "mlp.down_proj", hidden, ffn)
    block = Block(
        kind="dense",
        layers=tuple(range(layers)),
        tensors=(
            *attention("self_attn", sizes),
            *network,
            *norm("input_layernorm", hidden),
            *norm("post_attention_layernorm", hidden),
        ),
        norms=2,
        attention=sizes.attention(),
        mlp=Mlp(intermediate=ffn, gated=gated),
    )
    parts = Parts(
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        max_positions=None,
        layer_prefix="model.layers.{i}.",
        embedding=embedding("model.embed_tokens", vocab, hidden),
        blocks=(block,),
        final=(*norm("model.norm", hidden), *head(vocab, hidden, tied=tied)),
        tied=tied,
    )
    return _model(parts, name=name, source="sizes given by hand")


def config_by_hand(
    *, hidden: int, layers: int, heads: int, ffn: int, vocab: int, kv_heads: int | None = None
) -> dict[str, Any]:
    """The config.json of `model_by_hand`: a Llama, whose tensors are the same.

    >>> config_by_hand(hidden=64, layers=2, heads=4, ffn=96, vocab=256)["num_key_value_heads"]
    4
    """
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if kv_heads is None else kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
    }


def model_from_count(n_params: int) -> Model:
    """A model of which only the parameter count is known: one tensor without layers, good for states alone.

    >>> model_from_count(7_500_000_000).total_params
    7500000000
    """
    count = _whole("n_params", n_params)
    parts = Parts(
        vocab_size=0,
        hidden_size=0,
        num_layers=0,
        max_positions=None,
        layer_prefix="",
        embedding=(Tensor(name="parameters", shape=(count,), role="mlp"),),
        blocks=(),
        final=(),
        tied=False,
    )
    note = "only the parameter count is known: no layers, so nothing but the states can be said"
    return _model(parts, name=f"{count} parameters", source="parameter count given", notes=(note,), params_only=True)


def _split(name: str) -> tuple[str, int, str] | None:
    """Prefix, index and suffix at the first number in a dotted name; None when it has no number."""
    pieces = name.split(".")
    for at, piece in enumerate(pieces):
        if piece.isascii() and piece.isdigit() and 0 < at < len(pieces) - 1:
            return ".".join(pieces[:at]) + ".", int(piece), ".".join(pieces[at + 1 :])
    return None


def _layer_prefix(named: Sequence[tuple[str, tuple[int, ...]]]) -> str | None:
    """The prefix whose numbered parts hold the most elements: the stack of layers."""
    held: dict[str, int] = {}
    for name, shape in named:
        split = _split(name)
        if split is not None:
            held[split[0]] = held.get(split[0], 0) + Tensor(name=name, shape=shape, role="mlp").numel
    return max(held, key=lambda prefix: held[prefix]) if held else None


def from_module(module: Module, *, name: str = "module") -> Model:
    """The parameters of a module that has been built, by name and shape: good for states alone.

    Layers are the numbered parts (`layers.0.`, `layers.1.`, ...) of the stack that holds the most elements; equal
    ones share a Block. Roles and cuts are not known: matrices count as "mlp", and nothing is cut by TP.
    """
    parameters = getattr(module, "named_parameters", None)
    if not callable(parameters):
        raise BadInput(f"{type(module).__name__} has no named_parameters(); give a torch.nn.Module")
    named = [(str(key), tuple(int(size) for size in value.shape)) for key, value in module.named_parameters()]
    if not named:
        raise BadInput(f"{type(module).__name__} has no parameters; build it before giving it")
    prefix = _layer_prefix(named)
    before: list[Tensor] = []
    after: list[Tensor] = []
    layers: dict[int, list[Tensor]] = {}
    for key, shape in named:
        split = _split(key)
        if split is not None and split[0] == prefix:
            role = "mlp" if len(shape) > 1 else "norm"
            tensor = Tensor(name=split[2], shape=shape, role=role, linear=len(shape) == 2)
            layers.setdefault(split[1], []).append(tensor)
        elif layers:
            after.append(Tensor(name=key, shape=shape, role="norm" if len(shape) < 2 else "head"))
        else:
            before.append(Tensor(name=key, shape=shape, role="embedding"))
    kinds: dict[tuple[Tensor, ...], list[int]] = {}
    for index, tensors in layers.items():
        kinds.setdefault(tuple(tensors), []).append(index)
    blocks = tuple(
        Block(kind=f"layer-{number}", layers=tuple(indices), tensors=tensors, norms=0)
        for number, (tensors, indices) in enumerate(kinds.items())
    )
    parts = Parts(
        vocab_size=0,
        hidden_size=0,
        num_layers=len(layers),
        max_positions=None,
        layer_prefix=f"{prefix}{{i}}." if prefix else "",
        embedding=tuple(before),
        blocks=blocks,
        final=tuple(after),
        tied=False,
    )
    note = "read from a module: names and shapes only, so nothing but the states can be said"
    return _model(parts, name=name, source=f"parameters of a {type(module).__name__}", notes=(note,), params_only=True)
