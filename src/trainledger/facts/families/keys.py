"""How a family reads a config.json: which keys, of which type, with which default, and what it refuses.

A `Family` declares its keys; `read` turns a config into typed `Values` or refuses it, naming the value, the rule and
the knob. Defaults are those of the Hugging Face config class that the family names, as of `RELEASE`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from trainledger.errors import BadInput, UnknownName
from trainledger.facts.model import Block, Tensor

RELEASE = "transformers 5.24.0"
"""The release of the Hugging Face library whose config classes give the defaults."""

LAYER_LIMIT = 100_000
"""Layers are listed by index in a Model: beyond this the list alone would not fit; no model is near it."""

DIM_LIMIT = 2**62
"""No size by itself passes this; what sizes multiply to is checked when the model is built."""

Kind = Literal[
    "dim", "count", "flag", "words", "counts", "text", "period", "runs", "dim or text", "dim or dims", "factor", "last"
]

_EXPECTED: dict[str, str] = {
    "dim": "a whole number of at least 1",
    "count": "a whole number of at least 0",
    "flag": "true or false",
    "words": "a list of strings",
    "counts": "a list of whole numbers of at least 0",
    "text": "a string",
    "period": "a whole number of at least 0, or a string of one letter a layer",
    "dim or text": "a whole number of at least 1, or a string",
    "dim or dims": "a whole number of at least 1, or a list of them",
    "factor": "a number above 0",
    "last": "a whole number of at least 0, or -1",
    "runs": "a list of runs, each a list of strings and how often it is repeated",
}


class Key(msgspec.Struct, frozen=True):
    """One key that a family reads.

    default   of the config class; None: the class derives it, or the model has none
    nullable  null may be written, and means what a missing key with default None means
    aliases   other spellings that the config class accepts
    """

    default: Any
    kind: Kind = "dim"
    nullable: bool = False
    aliases: tuple[str, ...] = ()


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """What a family builds from the values it read; the fields are those of `Model`."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    max_positions: int | None
    layer_prefix: str
    embedding: tuple[Tensor, ...]
    blocks: tuple[Block, ...]
    final: tuple[Tensor, ...]
    tied: bool
    mtp: Block | None = None
    mtp_depths: int = 0
    unaccounted: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of config.json.

    name           the model_type, which is also `Model.family`
    config_class   the Hugging Face class whose defaults `keys` holds
    architectures  class names by which a config without model_type is recognised
    keys           what is read, because it changes shapes, windows or the number of positions
    ignored        keys of the class, or of configs on the Hub, that change no shape
    fixed          keys whose other values would change shapes in a way that is not modelled, with the values allowed
    build          values -> parts
    """

    name: str
    config_class: str
    architectures: tuple[str, ...]
    keys: Mapping[str, Key]
    build: Callable[[Values], Parts]
    model_types: tuple[str, ...] = ()
    ignored: frozenset[str] = frozenset()
    fixed: Mapping[str, tuple[object, ...]] = {}

    @property
    def defaults(self) -> dict[str, Any]:
        """Default of each key read, as `RELEASE`'s config class has it."""
        return {name: key.default for name, key in self.keys.items()}

    @property
    def read_keys(self) -> frozenset[str]:
        """Every spelling of every key read."""
        return frozenset(self.keys) | {alias for key in self.keys.values() for alias in key.aliases}

    @property
    def ignored_keys(self) -> frozenset[str]:
        """Known keys that change no shape."""
        return self.ignored | COMMON_IGNORED

    @property
    def fixed_keys(self) -> dict[str, tuple[object, ...]]:
        """Keys that may only hold the values given."""
        return {**COMMON_FIXED, **self.fixed}


class Values(msgspec.Struct, frozen=True):
    """A config after checking: every key of the family, typed, defaults filled in."""

    family: Family
    where: str
    items: Mapping[str, Any]
    filled: tuple[str, ...]

    def dim(self, key: str) -> int:
        """A number that the class always has."""
        value = self.items[key]
        if value is None:
            raise self.refuse(key, f"{self.family.config_class} has no default for it", f"--set {key}=N")
        return int(value)

    def maybe(self, key: str) -> int | None:
        """A number or null; null too for a key that the family does not have, as for the other kinds below."""
        value = self.items.get(key)
        return None if value is None else int(value)

    def flag(self, key: str) -> bool:
        """True or false; null counts as false."""
        return bool(self.items.get(key))

    def words(self, key: str) -> tuple[str, ...] | None:
        """A list of strings or null."""
        value = self.items.get(key)
        return None if value is None else tuple(value)

    def counts(self, key: str) -> tuple[int, ...] | None:
        """A list of numbers or null."""
        value = self.items.get(key)
        return None if value is None else tuple(value)

    def each(self, key: str, layers: int) -> tuple[int, ...] | None:
        """A number for each layer, where one may stand for all, or null."""
        value = self.items.get(key)
        if isinstance(value, (list, tuple)):
            if len(value) != layers:
                rule = f"its {len(value)} entries are not the {layers} layers"
                raise self.refuse(key, rule, f"give {layers} entries, or --set {key}=N for all")
            return tuple(int(item) for item in value)
        return None if value is None else (int(value),) * layers

    def refuse(self, key: str, rule: str, knob: str) -> BadInput:
        """An error about the value of `key`: what was seen, the rule, what to change."""
        return BadInput(f"{self.where}: {key} is {shown(self.items[key])}; {rule}; {knob}")


def shown(value: object) -> str:
    """The value as the file has it, shortened.

    >>> shown("4096")
    '"4096" (a string)'
    """
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    text = json.dumps(value, default=repr)
    if len(text) > 60:
        text = text[:57] + "..."
    return f"{text} (a string)" if isinstance(value, str) else text


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= DIM_LIMIT


def _list_of(value: object, fits: Callable[[object], bool]) -> bool:
    return isinstance(value, (list, tuple)) and all(fits(item) for item in value)


def _fits_run(run: object) -> bool:
    return isinstance(run, (list, tuple)) and len(run) == 2 and _fits(run[0], "words") and _fits(run[1], "dim")


_TESTS: dict[str, Callable[[object], bool]] = {
    "dim": lambda value: _whole(value, 1),
    "count": lambda value: _whole(value, 0),
    "last": lambda value: _whole(value, -1),
    "factor": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < DIM_LIMIT,
    "flag": lambda value: isinstance(value, bool),
    "text": lambda value: isinstance(value, str),
    "period": lambda value: isinstance(value, str) or _whole(value, 0),
    "dim or text": lambda value: isinstance(value, str) or _whole(value, 1),
    "dim or dims": lambda value: _whole(value, 1) or _list_of(value, lambda item: _whole(item, 1)),
    "words": lambda value: _list_of(value, lambda item: isinstance(item, str)),
    "counts": lambda value: _list_of(value, lambda item: _whole(item, 0)),
    "runs": lambda value: _list_of(value, _fits_run),
}


def _fits(value: object, kind: Kind) -> bool:
    return _TESTS[kind](value)


def _check(where: str, family: Family, name: str, key: Key, value: object) -> None:
    if value is None and key.nullable:
        return
    if _fits(value, key.kind):
        return
    expected = _EXPECTED[key.kind] + (" or null" if key.nullable else "")
    knob = f"write a number, or --set {name}=N"
    if isinstance(value, (float, str)) and key.kind in ("dim", "count"):
        plain = str(value).strip().removesuffix(".0")
        if plain.isascii() and plain.isdigit():
            knob = f"write {plain[:20]}, without quotes or point"
    elif key.kind not in ("dim", "count"):
        knob = "correct it, or remove the key to take the default"
    if isinstance(value, int) and not isinstance(value, bool) and value > DIM_LIMIT:
        expected += " and at most 2**62"
    raise BadInput(f"{where}: {name} is {shown(value)}; {family.config_class} takes {expected} here; {knob}")


def _pick(where: str, config: Mapping[str, Any], name: str, key: Key) -> tuple[str, Any] | None:
    """The spelling under which a key is given, and its value; None when it is missing."""
    given = [(spelling, config[spelling]) for spelling in (name, *key.aliases) if spelling in config]
    if len(given) > 1:
        given = [pair for pair in given if pair[1] is not None] or given[:1]
    for other in given[1:]:
        if other[1] != given[0][1]:
            raise BadInput(
                f"{where}: {given[0][0]} is {shown(given[0][1])} but {other[0]} is {shown(other[1])}; "
                f"both spell one key, so they must agree; remove one with --set {other[0]}=null"
            )
    return given[0] if given else None


def _check_known(where: str, family: Family, config: Mapping[str, Any]) -> None:
    known = family.read_keys | family.ignored_keys
    fixed = family.fixed_keys
    for name, value in config.items():
        if name in known or name.startswith("_"):
            continue
        if name in fixed:
            _check_fixed(where, family, name, value, fixed[name])
        elif not _is_off(name, value, family):
            raise UnknownName(
                f"key of a {family.name} config ({where}, {family.config_class}), and it could change shapes",
                name,
                known - COMMON_IGNORED,
                f"correct it, or remove it with --set {name}=null",
            )


def _check_fixed(where: str, family: Family, name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value is None or value in allowed:
        return
    raise BadInput(
        f"{where}: {name} is {shown(value)}; the {family.name} family is modelled for "
        f"{' or '.join(shown(item) for item in allowed)} only, another value changes shapes; "
        f"--set {name}={json.dumps(allowed[0])} if that is what is meant"
    )


def _is_off(name: str, value: object, family: Family) -> bool:
    """Whether an unknown key only says that a feature is not used, and is no misspelling of a key that is read."""
    if value is None:
        return True
    return value in (False, 0, "", [], {}) and not difflib.get_close_matches(name, family.read_keys, cutoff=0.8)


def read(family: Family, config: Mapping[str, Any], where: str) -> Values:
    """Check a config against a family and fill in the defaults of its class."""
    _check_known(where, family, config)
    items: dict[str, Any] = {}
    filled: list[str] = []
    for name, key in family.keys.items():
        given = _pick(where, config, name, key)
        if given is None:
            items[name] = key.default
            if key.default is not None:
                filled.append(f"{name}={json.dumps(key.default)}")
        else:
            _check(where, family, given[0], key, given[1])
            items[name] = given[1]
    layers = items.get("num_hidden_layers", items.get("n_layer"))
    if isinstance(layers, int) and layers > LAYER_LIMIT:
        raise BadInput(
            f"{where}: the number of layers is {shown(layers)}; at most {LAYER_LIMIT} can be listed; "
            "--set num_hidden_layers=N"
        )
    return Values(family, where, items, tuple(filled))


def names(*groups: str) -> frozenset[str]:
    """The words of some strings, as a set of keys."""
    return frozenset(word for group in groups for word in group.split())


def keys(base: Mapping[str, Key], **changes: object) -> dict[str, Key]:
    """A copy of `base` in which each key named has another default, or another Key."""
    out = dict(base)
    for name, value in changes.items():
        out[name] = value if isinstance(value, Key) else msgspec.structs.replace(out[name], default=value)
    return out


def without(base: Mapping[str, Key], *dropped: str) -> dict[str, Key]:
    """A copy of `base` that lacks some keys."""
    return {name: key for name, key in base.items() if name not in dropped}


def one_of(values: Values, key: str, words: Sequence[str], allowed: Sequence[str]) -> None:
    """Refuse a word that is not allowed in the list under `key`."""
    for word in words:
        if word not in allowed:
            raise values.refuse(key, f"its entry {shown(word)} is not one of {', '.join(allowed)}", f"correct {key}")


COMMON_FIXED: dict[str, tuple[object, ...]] = {
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "cross_attention_hidden_size": (None,),
    "pruned_heads": ({}, []),
}

_PLAIN = names(
    # what PretrainedConfig itself has held, over its releases
    """architectures model_type transformers_version torch_dtype dtype output_hidden_states output_attentions
    return_dict use_return_dict torchscript use_bfloat16 tf_legacy_loss chunk_size_feed_forward is_decoder id2label
    label2id num_labels problem_type finetuning_task task_specific_params tokenizer_class prefix bos_token_id
    eos_token_id pad_token_id sep_token_id decoder_start_token_id unk_token_id mask_token_id cls_token_id
    name_or_path attn_implementation experts_implementation gradient_checkpointing auto_map custom_pipelines
    quantization_config base_model_tp_plan base_model_pp_plan pretraining_tp""",
    # what generation reads
    """use_cache max_length max_new_tokens min_length min_new_tokens do_sample early_stopping num_beams
    num_beam_groups diversity_penalty temperature top_k top_p typical_p epsilon_cutoff eta_cutoff repetition_penalty
    length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences
    output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens cache_implementation num_logits_to_keep
    logits_to_keep generation_config assistant_early_exit""",
    # how weights start, and dropout, which is never applied
    """initializer_range init_std init_method attention_dropout hidden_dropout hidden_dropout_prob
    attention_probs_dropout_prob resid_pdrop embd_pdrop attn_pdrop dropout activation_dropout embedding_dropout
    residual_dropout classifier_dropout""",
    # what training and packaging tools leave behind
    """unsloth_version unsloth_fixed unsloth_training_args transformers.js_config use_flash_attn flash_attn
    use_flash_attention fp16 bf16 seq_length max_sequence_length model_max_length training_args torch_dtype_str
    is_llama_config is_quantized neftune_noise_alpha""",
)

IDLE = _PLAIN | names(
    "embd_drop attn_drop resid_drop",
    # auxiliary losses and noise of routers, which are never added
    "output_router_logits router_aux_loss_coef router_jitter_noise aux_loss_alpha seq_aux ep_size",
)
"""Keys that change nothing in a forward pass, whatever the family."""

COMMON_IGNORED = _PLAIN | names(
    # how activations are normalised, squashed and rotated
    """hidden_act hidden_activation activation_function activation rms_norm_eps layer_norm_eps layer_norm_epsilon
    norm_eps norm_epsilon rope_theta rope_scaling rope_parameters rope_pct rope_interleave rope_local_base_freq
    rotary_pct rotary_emb_base rotary_base partial_rotary_factor original_max_position_embeddings""",
)
"""Keys that change no parameter shape in any family here."""
