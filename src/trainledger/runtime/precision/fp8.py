"""Layers that multiply in FP8, by torchao: every matrix of the blocks, or an error; never a part of them in silence.

| recipe | input | weight | grad_output | products in FP8 | FSDP2 gathers |
|---|---|---|---|---|---|
| fp8-tensorwise | e4m3, one scale | e4m3, one scale | e5m2, one scale | all three | FP8 |
| fp8-rowwise | e4m3, a scale per row | e4m3, a scale per row | e4m3, a scale per row | all three | bf16 |
| fp8-forward | e4m3, one scale | e4m3, one scale | as it is | the forward's | bf16 |

Scales are torchao's dynamic ones: from the largest element of what is cast, each time. Only those of gathered weights
are computed beforehand, once after each optimizer step, for all layers in one all-reduce: until then they are those of
the weights before. torchao's own choice of layers leaves out those that are too small to be faster, without a word.
[torchao 0.18.0: float8/config.py, float8_linear_utils.py _auto_filter_for_recipe, fsdp_utils.py]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trainledger.errors import BadInput, Refused
from trainledger.runtime.launch.devices import LEAST_FP8
from trainledger.runtime.model import Decoder
from trainledger.runtime.precision.quiet import quiet_import
from trainledger.runtime.precision.share import fp8_layers
from trainledger.runtime.spec import RunSpec
from trainledger.runtime.tensors import Kept


class Fp8:
    """The FP8 layers of one rank, by their name in the whole model, and what has become of them."""

    def __init__(self, spec: RunSpec, device: torch.device) -> None:
        self._spec = spec
        self._device = device
        self._torchao = quiet_import("torchao.float8")
        from trainledger.runtime.precision import tally

        self._tally = tally
        tally.install()
        self._check_device()
        self.gathers = spec.precision == "fp8-tensorwise"
        self.settings = self._settings()
        self.layers: dict[str, nn.Module] = {}
        self.tallies: dict[str, tally.Tally] = {}
        self.fallen: list[str] = []
        self._decoders: list[Decoder] = []

    def _check_device(self) -> None:
        if self._device.type != "cuda":
            return
        found = torch.cuda.get_device_capability(self._device)
        if found < LEAST_FP8:
            name = torch.cuda.get_device_name(self._device)
            raise Refused(
                "fp8-sm",
                f"--precision {self._spec.precision} needs compute capability "
                f"{'.'.join(map(str, LEAST_FP8))}, and {name} has {'.'.join(map(str, found))}; use bf16",
            )

    def _settings(self) -> Any:  # noqa: ANN401  # torchao's Float8LinearConfig
        """Settings for torchao; on the CPU products are emulated, in fp32 on what the casts left."""
        config = self._torchao.Float8LinearConfig
        emulate = self._device.type == "cpu"
        if self._spec.precision == "fp8-rowwise":
            return dataclasses.replace(config.from_recipe_name("rowwise"), emulate=emulate)
        if self._spec.precision == "fp8-tensorwise":
            return config(emulate=emulate, enable_fsdp_float8_all_gather=True)
        left = self._left()
        return config(
            emulate=emulate,
            cast_config_input_for_grad_weight=left,
            cast_config_weight_for_grad_input=left,
            cast_config_grad_output=left,
            cast_config_grad_output_for_grad_weight=left,
        )

    def _left(self) -> Any:  # noqa: ANN401  # torchao's CastConfig
        """No cast at all. A new one each time, for torchao writes the dtype of the operand into it."""
        return self._torchao.CastConfig(scaling_type=self._torchao.ScalingType.DISABLED)

    def convert(self, decoder: Decoder) -> None:
        """Put an FP8 layer in the place of every matrix of the blocks here, before anything else wraps them."""
        wanted = fp8_layers(self._spec.model, decoder.block_paths)

        def chosen(_: nn.Module, path: str) -> bool:
            return path in wanted

        for name in wanted:
            layer = decoder.get_submodule(name)
            if type(layer) is not nn.Linear:
                raise Refused(
                    "runtime-fp8-layers",
                    f"{name} of {self._spec.model.name} is a {type(layer).__name__}, which torchao does not convert; "
                    "use --precision bf16",
                )
        self._torchao.convert_to_float8_training(decoder, config=self.settings, module_filter_fn=chosen)
        for name in wanted:
            self._watch(name, cast("Any", decoder.get_submodule(name)))
        self._decoders.append(decoder)

    def _watch(self, name: str, layer: Any) -> None:  # noqa: ANN401  # torchao's Float8Linear
        tally = self.tallies[name] = self._tally.Tally()
        layer.linear_mm_config = self._tally.counted(layer.linear_mm_config, tally)
        if self.gathers:
            layer.weight._linear_mm_config = layer.linear_mm_config
        self.layers[name] = layer

    def weights_changed(self) -> None:
        """Compute the scales that gathered weights are cast with, from what they are now: on all ranks together.

        After each step, and after anything else that writes weights: a checkpoint, say. Weights must be sharded.
        """
        if self.gathers:
            for decoder in self._decoders:
                self._torchao.precompute_float8_dynamic_scale_for_fsdp(decoder)

    def scales(self, parameters: Iterable[Kept]) -> Iterator[torch.Tensor]:
        """Scales of gathered weights: those of the weights now, and those that what was gathered last is cast with."""
        for kept in parameters if self.gathers else ():
            shard, record = _local(kept.parameter), kept.record
            gathered = None if record is None else getattr(record, "_unsharded_param", None)
            found = (
                getattr(shard, "_precomputed_scale", None),
                None if gathered is None else getattr(_local(gathered), "_scale", None),
            )
            yield from (scale for scale in found if scale is not None)

    def count(self, *, on: bool) -> None:
        """Whether casts are counted from now on."""
        for tally in self.tallies.values():
            tally.counting = on

    def fall_back(self, layer: str, parameters: Iterable[Kept]) -> None:
        """Let a layer compute in 16 bits from now on, between two steps. A layer of another stage is nothing here."""
        known = fp8_layers(self._spec.model)
        if layer not in known:
            raise BadInput(f"{layer!r} is no FP8 layer of this run; name one such as {known[0]}")
        if layer in self.fallen:
            return
        self.fallen.append(layer)
        if layer not in self.layers:
            return
        found = cast("Any", self.layers[layer])
        found.config = self._without_casts()
        if self.gathers:
            (kept,) = (kept for kept in parameters if kept.name == f"{layer}.weight")
            _gather_plain(kept)

    def _without_casts(self) -> Any:  # noqa: ANN401  # torchao's Float8LinearConfig
        names = ("input", "weight", "grad_output")
        operands = (*names, "input_for_grad_weight", "weight_for_grad_input", "grad_output_for_grad_weight")
        casts = {f"cast_config_{name}": self._left() for name in operands}
        config = self._torchao.Float8LinearConfig(emulate=self.settings.emulate, **casts)
        for name in names:
            # scales of gathered weights are computed for layers of one dtype together
            dtype = getattr(self.settings, f"cast_config_{name}").target_dtype
            object.__setattr__(getattr(config, f"cast_config_{name}"), "target_dtype", dtype)
        return config


def _local(tensor: torch.Tensor) -> Any:  # noqa: ANN401  # torchao's tensor, where it wraps one
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _gather_plain(kept: Kept) -> None:
    """Gather a weight in 16 bits, of which torchao's tensor knows how to gather FP8 only.

    FSDP2 asks the shard itself what to send and what to make of it, each time it gathers; what it made before is of
    another dtype, and is made anew. [torch: distributed/fsdp/_fully_shard/_fsdp_param.py all_gather_inputs,
    init_unsharded_param]
    """
    record, weight = kept.record, kept.parameter
    shard = _local(weight)
    assert record is not None, "what torchao gathers is wrapped by FSDP2"
    dtype = record.param_dtype or record.orig_dtype

    def send(mesh: DeviceMesh) -> tuple[tuple[torch.Tensor, ...], None]:
        del mesh
        return (shard._tensor.to(dtype),), None

    def receive(
        parts: tuple[torch.Tensor, ...], _: None, __: torch.dtype, *, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        return None if out is not None else (parts[0], ())

    shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = send, receive
    record.all_gather_outputs = []
    record._unsharded_inner_tensors = []
    if hasattr(record, "_unsharded_param"):
        del record._unsharded_param
