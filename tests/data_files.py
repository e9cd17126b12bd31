"""Text, token files and specs that the tests of data share."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from trainledger.facts.model_load import load_with_config
from trainledger.runtime.data.token_file import BYTES, START_BYTES, Facts, TokenFile, append, dtype_of, header
from trainledger.runtime.spec import RunSpec

TEXT = "To be, or not to be: that is the question.\nWhether 'tis nobler in the mind to suffer\n" * 40
MODEL = "llama-3.1-8b"
AXES = {"tp": 1, "pp": 1, "vpp": 1, "cp": 1, "ep": 1, "etp": 1, "dp_replicate": 1, "dp_shard": 1, "zero_stage": 0}


def token_file(path: Path, tokens: Sequence[int] | npt.NDArray[np.integer], vocab_size: int = 256) -> TokenFile:
    """A file of these tokens, as `prepare` would write it."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        file.seek(START_BYTES)
        append(file, digest, np.asarray(tokens), dtype_of(vocab_size))
        file.seek(0)
        facts = Facts(
            dtype=dtype_of(vocab_size),
            count=len(tokens),
            vocab_size=vocab_size,
            tokenizer=BYTES,
            text="",
            part="train",
            held_out=0.1,
            sha256=digest.hexdigest(),
        )
        file.write(header(facts))
    return TokenFile.open(path)


def text_file(path: Path, text: str = TEXT) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def tokenizer_json(path: Path, vocab_size: int = 300, text: str = TEXT) -> Path:
    """A byte-level BPE that was trained on a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.save(str(path))
    return path


def spec_of(*, seq: int, vocab_size: int = 256, seed: int = 0, plan: Mapping[str, int]) -> RunSpec:
    """A run of a small Llama; the plan is one rank's unless it says more."""
    config, model = load_with_config(
        MODEL, overrides={"num_hidden_layers": "2", "vocab_size": str(vocab_size), "hidden_size": "64"}
    )
    row = {**AXES, "mbs": 1, "num_microbatches": 1, **plan}
    return RunSpec(model=model, config=config, plan=row, seq=seq, seed=seed)
