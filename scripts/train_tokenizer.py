"""Make a tokenizer.json of a text: a byte-level BPE, which no text is foreign to.

    python scripts/train_tokenizer.py TEXT [TEXT ...] --vocab-size N --out FILE

It learns from the first nine tenths of each text, for `train` holds out ends, and has no special tokens. The same text
and size make the same file.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

LEARNED = 0.9
LEAST = 256
"""One token for every byte."""


def trained(texts: list[str], vocab_size: int) -> Tokenizer:
    """A tokenizer of so many tokens, of which the first 256 are the bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator((text[: int(len(text) * LEARNED)] for text in texts), trainer)
    return tokenizer


def main() -> None:
    """Read, learn, write."""
    parser = argparse.ArgumentParser(description="Make a tokenizer.json of a text.")
    parser.add_argument("texts", type=Path, nargs="+", metavar="TEXT")
    parser.add_argument("--vocab-size", type=int, required=True, metavar="N")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    asked = parser.parse_args()
    if asked.vocab_size < LEAST:
        parser.error(f"--vocab-size is {asked.vocab_size}: every byte has a token, so it is {LEAST} or more")
    tokenizer = trained([path.read_text(encoding="utf-8") for path in asked.texts], asked.vocab_size)
    tokenizer.save(str(asked.out))
    print(f"{asked.out}: {tokenizer.get_vocab_size()} tokens")


if __name__ == "__main__":
    main()
