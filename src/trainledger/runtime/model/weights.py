"""Weights on disk, as safetensors under the names of the Hugging Face state dict.

A stack of experts is split into one tensor for each expert, as checkpoints on the Hub hold them, and put together
again. Nothing is changed in a decoder before every tensor has been found and has the right shape. Checkpoints that
transformers 5 wrote with its own stacked names (save_original_format=False) are not read.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from trainledger.errors import BadInput
from trainledger.facts.model import Model
from trainledger.runtime.model.decoder import Decoder
from trainledger.runtime.model.moe import Moe

CORRECTION = "e_score_correction_bias"
"""Last part of the name of what sigmoid routers add to their scores when they choose: no parameter, but on disk."""

_BUFFERS = (".inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")
"""Ends of names of buffers that older releases of transformers wrote and that can be computed."""

_DTYPES = ("F64", "F32", "F16", "BF16")
"""What safetensors calls the dtypes that hold weights as they are."""


def decoder_tensors(decoder: Decoder) -> dict[str, Tensor]:
    """Everything that a checkpoint of this decoder holds: parameters, and corrections of routers where they are set."""
    held: dict[str, Tensor] = {name: parameter.detach() for name, parameter in decoder.named_parameters()}
    return held | {name: moe.correction for name, moe in _routers(decoder).items() if moe.correction is not None}


def save_safetensors(tensors: Mapping[str, Tensor], path: str | Path) -> None:
    """Write tensors, whose names may have `*` for the index of the expert, to one file, whole or not at all."""
    target = Path(path)
    flat = {single: part for name, tensor in tensors.items() for single, part in split_stack(name, tensor)}
    unfinished = target.with_name(target.name + ".unfinished")
    try:
        save_file(flat, unfinished, metadata={"format": "pt"})
        unfinished.replace(target)
    except (OSError, safetensors.SafetensorError) as error:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise BadInput(
            f"{target} cannot be written ({error}); check the folder, its permissions and its space"
        ) from error


def load_safetensors(decoder: Decoder, path: str | Path) -> None:
    """Fill the parameters that this decoder holds from a file, or from a directory that has the whole model.

    A directory holds model.safetensors, or the files that its model.safetensors.index.json names. Tensors of other
    pipeline stages, of multi-token-prediction layers and computable buffers are passed over; anything else that the
    model does not have is refused.
    """
    with contextlib.ExitStack() as stack:
        files = [_Opened(file, stack) for file in _files(Path(path))]
        where = {name: file for file in files for name in file.names}
        named = decoder.named_parameters()
        wanted = {single: part for name, parameter in named for single, part in split_stack(name, parameter)}
        _check(decoder, Path(path), wanted, where)
        _check_tied(decoder, where)
        with torch.no_grad():
            for name, target in wanted.items():
                target.copy_(where[name].tensor(name))
        for name, moe in _routers(decoder).items():
            if name in where:
                device = next(moe.parameters()).device
                moe.correction = where[name].tensor(name).to(device=device, dtype=torch.float32)


class _Opened:
    """One safetensors file that is open for reading; the exit stack closes it."""

    def __init__(self, path: Path, stack: contextlib.ExitStack) -> None:
        self.path = path
        try:
            self._file: Any = stack.enter_context(safetensors.safe_open(path, framework="pt"))  # pyright: ignore[reportUnknownMemberType]  # untyped extension
            self.names: list[str] = list(self._file.keys())
        except (OSError, safetensors.SafetensorError) as error:
            raise BadInput(
                f"{path} cannot be read as safetensors ({error}); it is damaged or something else: get it again"
            ) from error

    def shape(self, name: str) -> tuple[int, ...]:
        """Sizes of a tensor, from the file's header."""
        return tuple(self._file.get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """The dtype of a tensor, as safetensors calls it."""
        return str(self._file.get_slice(name).get_dtype())

    def tensor(self, name: str) -> Tensor:
        """The values."""
        try:
            return self._file.get_tensor(name)
        except (OSError, safetensors.SafetensorError) as error:
            raise BadInput(f"{self.path}: {name} cannot be read ({error}); get the file again") from error


def split_stack(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A tensor under its name on disk; a stack as one view for each index."""
    if "*" not in name:
        yield name, tensor
        return
    for index, part in enumerate(tensor):
        yield name.replace("*", str(index)), part


def _routers(decoder: Decoder) -> dict[str, Moe]:
    """Sigmoid routers by the name under which their correction is on disk."""
    return {
        f"{path}.{module.rule.gate}.{CORRECTION}": module
        for path, module in decoder.named_modules()
        if isinstance(module, Moe) and module.rule.router == "sigmoid"
    }


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return [path / "model.safetensors"]
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{index} is not an index of safetensors files ({error!r}); get it again") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise BadInput(f"{index} names the file {name!r}; it takes names of files beside it; correct it")
    return [path / name for name in sorted(names)]


def _check(decoder: Decoder, path: Path, wanted: Mapping[str, Tensor], where: Mapping[str, _Opened]) -> None:
    """Every tensor is there with the right shape, and nothing is there that the model does not have."""
    for name, target in wanted.items():
        if name not in where:
            raise BadInput(
                f"{path} has no tensor {name} {list(target.shape)}, which {decoder.facts.name} needs; "
                "give the checkpoint of this very model, in the names of the Hugging Face Hub"
            )
        file = where[name]
        if file.shape(name) != tuple(target.shape):
            raise BadInput(
                f"{file.path}: {name} is {list(file.shape(name))}; {decoder.facts.name} has {list(target.shape)}; "
                "give the checkpoint of this very model"
            )
        if file.dtype(name) not in _DTYPES:
            raise BadInput(
                f"{file.path}: {name} is {file.dtype(name)}; weights are read as {', '.join(_DTYPES)}; "
                "give a checkpoint that is not quantized"
            )
    known = set(_model_names(decoder.facts)) | set(_routers(decoder))
    for name, file in where.items():
        if name not in known and not _passed_over(decoder, name):
            raise BadInput(
                f"{file.path}: {name} is no tensor of {decoder.facts.name}; give the checkpoint of this very model"
            )


def _model_names(model: Model) -> Iterator[str]:
    """Names on disk of all parameters of the whole model."""
    for tensor in (*model.embedding, *model.final):
        yield tensor.name
    for block in model.blocks:
        for layer in block.layers:
            prefix = model.layer_prefix.format(i=layer)
            for tensor in block.tensors:
                copies = range(tensor.copies) if "{e}" in tensor.name else range(1)
                yield from (prefix + tensor.name.replace("{e}", str(index)) for index in copies)


def _passed_over(decoder: Decoder, name: str) -> bool:
    """A computable buffer, a correction elsewhere, a layer of multi-token prediction, or a tied output layer."""
    model = decoder.facts
    if name.endswith((*_BUFFERS, CORRECTION)):
        return True
    if model.mtp is not None:
        beyond = (model.layer_prefix.format(i=model.num_layers + depth) for depth in range(model.mtp_depths))
        if name.startswith(tuple(beyond)):
            return True
    return model.tied and name == f"{decoder.semantics.exit.head}.weight"


def _check_tied(decoder: Decoder, where: Mapping[str, _Opened]) -> None:
    """A tied output layer that stands in the file as well must be the table."""
    head, table = f"{decoder.semantics.exit.head}.weight", f"{decoder.semantics.entry.tokens}.weight"
    if not decoder.facts.tied or head not in where or table not in where:
        return
    if not torch.equal(where[head].tensor(head), where[table].tensor(table)):
        raise BadInput(
            f"{where[head].path}: {head} is not {table}, and {decoder.facts.name} ties them; "
            "set tie_word_embeddings=false, or give the checkpoint of this very model"
        )
