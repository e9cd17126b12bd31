"""From text to tokens: a tokenizer.json of the Hugging Face `tokenizers` library, or the bytes as they are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trainledger.errors import BadInput
from trainledger.runtime.data.token_file import BYTES

PIECE_BYTES = 1 << 18
"""A text is cut at the end of a line once a piece has so many bytes, and every piece is encoded on its own."""

Ids = npt.NDArray[np.integer]


class Tokenizer(Protocol):
    """What makes tokens of text.

    digest       SHA-256 of its file, or "bytes"
    vocab_size   every token is below it
    """

    digest: str
    vocab_size: int

    def encode(self, text: Path, first: int, end: int) -> Iterator[Ids]:
        """The tokens of the bytes [first, end) of a file, piece by piece."""
        ...


class ByteTokenizer:
    """A token is a byte: nothing can be missing from its vocabulary, and there is no file to lose."""

    digest = BYTES
    vocab_size = 256

    def encode(self, text: Path, first: int, end: int) -> Iterator[Ids]:
        """The bytes, a piece at a time."""
        with text.open("rb") as file:
            file.seek(first)
            while first < end and (piece := file.read(min(PIECE_BYTES, end - first))):
                first += len(piece)
                yield np.frombuffer(piece, dtype=np.uint8)


class FileTokenizer:
    """A tokenizer.json; no special tokens are added to what it makes of a text."""

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer as Loaded
        except ImportError:
            raise BadInput(
                f"{path} is read by the tokenizers library, which is not installed; pip install 'trainledger[train]', "
                'or prepare the text with the tokenizer "bytes"'
            ) from None
        told = _read(path)
        try:
            self._loaded = Loaded.from_str(told.decode())
        except Exception as error:  # noqa: BLE001  # the library raises Exception itself for any file it cannot use
            raise BadInput(
                f"{path} is not a tokenizer.json that the tokenizers library can read ({error}); name the "
                'tokenizer.json of the model, or "bytes"'
            ) from None
        self._path = path
        self.digest = hashlib.sha256(told).hexdigest()
        self.vocab_size = max(self._loaded.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: Path, first: int, end: int) -> Iterator[Ids]:
        """The tokens of whole lines at a time; a text that is not UTF-8 is refused with the place."""
        for start, piece in _pieces(text, first, end):
            try:
                words = piece.decode()
            except UnicodeDecodeError as error:
                raise BadInput(
                    f"{text} is not UTF-8 at byte {start + error.start}, and {self._path} reads characters; "
                    'convert the text, or use the tokenizer "bytes"'
                ) from None
            yield np.array(self._loaded.encode(words, add_special_tokens=False).ids, dtype=np.int64)


def open_tokenizer(named: str) -> Tokenizer:
    """The tokenizer of a name: "bytes", or the path of a tokenizer.json."""
    return ByteTokenizer() if named == BYTES else FileTokenizer(Path(named))


def _pieces(text: Path, first: int, end: int) -> Iterator[tuple[int, bytes]]:
    """(where it starts, bytes) of each piece: lines until there are PIECE_BYTES, so no character is cut."""
    with text.open("rb") as file:
        file.seek(first)
        while first < end and (lines := file.readlines(min(PIECE_BYTES, end - first))):
            piece = b"".join(lines)[: end - first]
            yield first, piece
            first += len(piece)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInput(f"{path} cannot be read as a tokenizer.json: {error.strerror or error}") from None
