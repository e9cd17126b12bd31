"""Files of tokens: a header that says what they are and can be checked, then the tokens, mapped into memory.

    bytes 0 to 7      the magic
    8 to 11           version of the format, unsigned, little-endian as everything here
    12 to 15          bytes of the facts
    16 to 47          SHA-256 of the facts
    48 on             the facts as JSON, then zeros
    4096 on           the tokens, uint16 where the vocabulary allows it, else uint32

The name of a file says nothing about its tokens, so whoever reads one asks for what the header says.
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from trainledger.errors import BadInput
from trainledger.runtime.data.hashed import hash_of

MAGIC = b"TLTOKENS"
VERSION = 1
START_BYTES = 4096
"""Where the tokens start: a page, which is what memory is mapped by."""
CHUNK_BYTES = 1 << 20
BYTES = "bytes"
"""The tokenizer that has no file: a token is a byte of the text."""

Tokens = npt.NDArray[np.uint16 | np.uint32]

_FIXED = struct.Struct("<8sII32s")
_NEXT = "prepare the text again"


class Facts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the header of a file says.

    count            tokens in the file
    vocab_size       of the tokenizer: every token is below it
    tokenizer        SHA-256 of its tokenizer.json, or "bytes"
    text             SHA-256 of the whole text that was prepared, both parts of it
    part             which part of that text this is
    held_out         the share of the text that was held out
    sha256           of the tokens as they are stored
    """

    dtype: Literal["uint16", "uint32"]
    count: int
    vocab_size: int
    tokenizer: str
    text: str
    part: Literal["train", "held-out"]
    held_out: float
    sha256: str


class TokenFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of tokens that is there, whole by its size, and has the header of one."""

    path: Path
    facts: Facts

    @classmethod
    def open(cls, path: Path) -> TokenFile:
        """Read and check the header and the size, but not every token: that is `verify`, which reads the file.

        Raises BadInput for a file that is missing, foreign, of another version, altered in its header, or cut off.
        """
        try:
            with path.open("rb") as file:
                facts = _facts(path, file.read(START_BYTES))
                found = file.seek(0, 2)
        except OSError as error:
            raise BadInput(f"{path} cannot be read as a token file: {error.strerror or error}") from None
        want = START_BYTES + facts.count * np.dtype(facts.dtype).itemsize
        if found != want:
            what = "cut off" if found < want else "longer than it says"
            raise BadInput(f"{path} is {what}: {facts.count} tokens take {want} B and it has {found} B; {_NEXT}")
        return cls(path=path, facts=facts)

    def verify(self) -> TokenFile:
        """This file, once the hash of its tokens is that of the header; read whole unless nobody has written it since.

        That it was hashed is kept beside it, in `<name>.hash`, where it can be.
        """
        found = hash_of([self.path], self._hash, self.path.with_name(f"{self.path.name}.hash"))
        if found != self.facts.sha256:
            raise BadInput(
                f"{self.path} was altered: its tokens have SHA-256 {found} and its header says "
                f"{self.facts.sha256}; {_NEXT}"
            )
        return self

    def _hash(self) -> str:
        """SHA-256 of the tokens as they are on disk."""
        with self.path.open("rb") as file:
            file.seek(START_BYTES)
            return hashlib.file_digest(file, "sha256").hexdigest()

    def tokens(self) -> Tokens:
        """All tokens [count], mapped and read-only: memory is taken by what is looked at."""
        return np.memmap(
            self.path, dtype=_stored(self.facts.dtype), mode="r", offset=START_BYTES, shape=self.facts.count
        )

    def sequences(self, seq: int) -> int:
        """Whole sequences of `seq` tokens, each with the label of its last one."""
        return max(0, (self.facts.count - 1) // seq)


def header(facts: Facts) -> bytes:
    """The first START_BYTES of a file of these facts."""
    told = msgspec.json.encode(facts)
    return (_FIXED.pack(MAGIC, VERSION, len(told), hashlib.sha256(told).digest()) + told).ljust(START_BYTES, b"\0")


def dtype_of(vocab_size: int) -> Literal["uint16", "uint32"]:
    """The narrowest type that every token of a vocabulary fits.

    >>> dtype_of(65536), dtype_of(65537)
    ('uint16', 'uint32')
    """
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def append(file: BinaryIO, digest: hashlib._Hash, tokens: npt.NDArray[np.integer], dtype: str) -> None:
    """Write tokens after those that are there, and into their hash."""
    stored = tokens.astype(_stored(dtype)).tobytes()
    digest.update(stored)
    file.write(stored)


def _stored(dtype: str) -> np.dtype[np.uint16 | np.uint32]:
    return np.dtype(dtype).newbyteorder("<")


def _facts(path: Path, start: bytes) -> Facts:
    """The facts of a header, once it is one."""
    if not start.startswith(MAGIC):
        raise BadInput(
            f"{path} is not a token file: it starts with {start[:8]!r} and not {MAGIC!r}; prepare it from text"
        )
    if len(start) < START_BYTES:
        raise BadInput(f"{path} is cut off: a header takes {START_BYTES} B and the file has {len(start)} B; {_NEXT}")
    _, version, length, digest = _FIXED.unpack_from(start)
    if version != VERSION:
        raise BadInput(
            f"{path} is a token file of version {version}, and this release reads version {VERSION}; {_NEXT}"
        )
    told = start[_FIXED.size : _FIXED.size + length]
    if hashlib.sha256(told).digest() != digest:
        raise BadInput(f"{path} was altered: its header is not what its own SHA-256 says; {_NEXT}")
    try:
        return msgspec.json.decode(told, type=Facts)
    except msgspec.DecodeError as error:
        raise BadInput(f"{path} has a header that this release does not know ({error}); {_NEXT}") from None
