"""From text to tokens to learn from and tokens that are held out, in a folder that is there whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from trainledger.errors import BadInput
from trainledger.runtime.data.hashed import hash_of
from trainledger.runtime.data.token_file import CHUNK_BYTES, START_BYTES, Facts, TokenFile, append, dtype_of, header
from trainledger.runtime.data.tokenizer import Ids, Tokenizer, open_tokenizer
from trainledger.runtime.files import sync

TRAIN, HELD_OUT, TEXT_HASH = "train.tokens", "held-out.tokens", "text.hash"
MOST_HELD_OUT = 0.5

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a disk, or of a share of it, that has no more room."""

Part = Literal["train", "held-out"]


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """What `prepare` leaves behind.

    held_out   None where no text was held out
    """

    train: TokenFile
    held_out: TokenFile | None


class _Text(msgspec.Struct, frozen=True, kw_only=True):
    """A text file: bytes before `cut` are learned from, those from it on are held out."""

    path: Path
    cut: int
    size: int


def prepare(texts: Sequence[Path], tokenizer: str, out: Path, *, held_out: float) -> Prepared:
    """Tokens of the texts, one after the other, in the new folder `out`; in one pass and little memory.

    tokenizer   path of a tokenizer.json, or "bytes"
    held_out    the share of each text, from a line near its end on, that goes into a file of its own

    Every file is written beside `out` first and the folder is then renamed, so that whoever sees it sees all of it. A
    folder that already holds the tokens of these texts is checked and used; one that holds anything else is refused.
    """
    check_share(held_out)
    if not texts:
        raise BadInput("no text is named to make tokens of; name at least one file")
    encoder = open_tokenizer(tokenizer)
    cut = [_cut(path, held_out) for path in texts]
    text = hash_of(texts, lambda: _digest(texts), out / TEXT_HASH)
    if not out.exists():
        _publish(cut, encoder, text, out, held_out)
    return _found(out, encoder, text, held_out)


def check_share(held_out: float) -> None:
    """Refuse a share that would leave nothing to learn from, or is none."""
    if not 0 <= held_out <= MOST_HELD_OUT:
        raise BadInput(
            f"--held-out is {held_out}: the share of the text that is held out is between 0 and {MOST_HELD_OUT}"
        )


def _cut(path: Path, held_out: float) -> _Text:
    """Where the held-out part of a text starts: at the first line that starts beyond its share."""
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise BadInput(f"{path} is no regular file, and a text is read several times; write it into one")
        with path.open("rb") as file:
            if held_out == 0:
                return _Text(path=path, cut=size, size=size)
            wanted = size - int(size * held_out)
            file.seek(max(0, wanted - 1))
            while (line := file.readline(CHUNK_BYTES)) and not line.endswith(b"\n"):
                pass
            return _Text(path=path, cut=file.tell(), size=size)
    except OSError as error:
        raise BadInput(f"{path} cannot be read as text: {error.strerror or error}") from None


def _digest(texts: Sequence[Path]) -> str:
    """SHA-256 of each text's length and bytes, in order."""
    whole = hashlib.sha256()
    for path in texts:
        with path.open("rb") as file:
            whole.update(os.fstat(file.fileno()).st_size.to_bytes(8, "little"))
            while piece := file.read(CHUNK_BYTES):
                whole.update(piece)
    return whole.hexdigest()


def _publish(texts: Sequence[_Text], tokenizer: Tokenizer, text: str, out: Path, held_out: float) -> None:
    """Write both files into a folder beside `out`, and give it that name."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.parent))
    except OSError as error:
        raise BadInput(
            f"{out} cannot be made: {error.strerror or error}; name a folder that can be written to"
        ) from None
    try:
        for part in ("train", "held-out") if held_out else ("train",):
            _write(beside / f"{part}.tokens", texts, tokenizer, text, part, held_out)
        beside.chmod(0o777 & ~_mask())
        _renamed(beside, out)
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise BadInput(f"{out} cannot be written: {error.strerror}; make room, or name another folder") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _write(path: Path, texts: Sequence[_Text], tokenizer: Tokenizer, text: str, part: Part, held_out: float) -> None:
    dtype, count, digest = dtype_of(tokenizer.vocab_size), 0, hashlib.sha256()
    with path.open("wb") as file:
        file.seek(START_BYTES)
        for ids in _encoded(texts, tokenizer, part):
            assert not ids.size or 0 <= ids.min() <= ids.max() < tokenizer.vocab_size, (
                "a tokenizer knows its own tokens"
            )
            append(file, digest, ids, dtype)
            count += ids.size
        if not count:
            raise BadInput(_no_token(texts, part, held_out))
        facts = Facts(
            dtype=dtype,
            count=count,
            vocab_size=tokenizer.vocab_size,
            tokenizer=tokenizer.digest,
            text=text,
            part=part,
            held_out=held_out,
            sha256=digest.hexdigest(),
        )
        file.seek(0)
        file.write(header(facts))
        file.flush()
        os.fsync(file.fileno())


def _no_token(texts: Sequence[_Text], part: Part, held_out: float) -> str:
    """What to do about a part that came out empty: a text is divided between two of its lines."""
    first, more = texts[0].path, len(texts) - 1
    named = f"{first} ({texts[0].size} B){f' and {more} more' if more else ''}"
    if part == "held-out":
        return (
            f"the held-out part of {named} has no token: it is the lines that begin in the last {held_out:g} of each "
            "text; give text with more lines, a larger held-out, or held-out = 0 for none"
        )
    return f"the train part of {named} has no token; give more text, or hold less of it out"


def _encoded(texts: Sequence[_Text], tokenizer: Tokenizer, part: Part) -> Iterator[Ids]:
    for text in texts:
        span = (0, text.cut) if part == "train" else (text.cut, text.size)
        yield from tokenizer.encode(text.path, *span)


def _renamed(beside: Path, out: Path) -> None:
    """Give a folder its name; where another process was first, its folder stays, and is checked like any other."""
    try:
        beside.rename(out)
    except OSError:
        if not out.exists():
            raise
        return
    sync(out.parent)


def _mask() -> int:
    """The process's umask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _found(out: Path, tokenizer: Tokenizer, text: str, held_out: float) -> Prepared:
    """The files in `out`, once they are those that were asked for."""
    train = _asked(out / TRAIN, tokenizer, text, held_out)
    return Prepared(train=train, held_out=_asked(out / HELD_OUT, tokenizer, text, held_out) if held_out else None)


def _asked(path: Path, tokenizer: Tokenizer, text: str, held_out: float) -> TokenFile:
    file = TokenFile.open(path).verify()
    facts = file.facts
    other = {
        "text": facts.text != text,
        "tokenizer": facts.tokenizer != tokenizer.digest,
        "held-out share": facts.held_out != held_out,
    }
    if any(other.values()):
        differs = " and ".join(name for name, differs in other.items() if differs)
        raise BadInput(f"{path} was prepared with another {differs}; name a new folder, or remove this one")
    return file
