"""Whether token files are fit for a run: asked before a process is started, and without torch."""

from __future__ import annotations

from trainledger.errors import Refused
from trainledger.runtime.data.token_file import TokenFile
from trainledger.runtime.data.tokenizer import Tokenizer
from trainledger.runtime.spec import RunSpec


def check_data(
    spec: RunSpec,
    train: TokenFile,
    held_out: TokenFile | None = None,
    *,
    eval_sequences: int = 0,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Refuse, by a rule with a name, tokens that the run cannot learn from or be judged by.

    eval_sequences   held-out sequences of an evaluation; 0: all
    tokenizer        the one that the run names; None where it names none
    """
    for file in (train, held_out):
        if file is not None:
            _check_vocabulary(spec, file)
            if tokenizer is not None:
                _check_tokenizer(file, tokenizer)
    _check_length(spec, train)
    if held_out is not None:
        _check_held_out(spec, train, held_out, eval_sequences)


def _check_vocabulary(spec: RunSpec, file: TokenFile) -> None:
    have, most = file.facts.vocab_size, spec.model.vocab_size
    if have > most:
        raise Refused(
            "data-vocabulary",
            f"{file.path} has tokens of a vocabulary of {have}, and {spec.model.name} has rows for {most}; set its "
            f"vocab_size to {have} or more, or prepare the text with the tokenizer of the model",
        )


def _check_tokenizer(file: TokenFile, tokenizer: Tokenizer) -> None:
    if file.facts.tokenizer != tokenizer.digest:
        raise Refused(
            "data-tokenizer",
            f"{file.path} was made by the tokenizer {file.facts.tokenizer}, and the run names {tokenizer.digest}; name "
            "that one, or prepare the text again with this one",
        )


def _check_length(spec: RunSpec, train: TokenFile) -> None:
    step = spec.sequences_per_step
    have = train.sequences(spec.seq)
    if have < step:
        raise Refused(
            "data-length",
            f"{train.path} has {train.facts.count} tokens, {have} sequences of {spec.seq} with their labels, and one "
            f"step takes {step}: it would see some of them twice; give it {step * spec.seq + 1} tokens or more, or "
            "lower --gbs or --seq",
        )


def _check_held_out(spec: RunSpec, train: TokenFile, held_out: TokenFile, wanted: int) -> None:
    if held_out.facts.tokenizer != train.facts.tokenizer:
        raise Refused(
            "data-tokenizer",
            f"{held_out.path} was made by the tokenizer {held_out.facts.tokenizer} and {train.path} by "
            f"{train.facts.tokenizer}; prepare both with one",
        )
    if held_out.facts.sha256 == train.facts.sha256:
        raise Refused(
            "data-held-out",
            f"{held_out.path} has the tokens of {train.path}: a loss on what was learned says nothing; hold text out",
        )
    have = held_out.sequences(spec.seq)
    if have < max(1, wanted):
        raise Refused(
            "data-held-out",
            f"{held_out.path} has {have} sequences of {spec.seq} tokens with their labels, and an evaluation takes "
            f"{wanted or 'at least 1'}; hold more text out, lower eval-sequences, or lower --seq",
        )
