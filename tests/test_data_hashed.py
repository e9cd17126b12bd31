"""Files are hashed once, until somebody writes them; whatever is kept of a hash is good for nothing else."""

from __future__ import annotations

import importlib
import os
import shutil
from pathlib import Path

import pytest

from data_files import TEXT, token_file
from trainledger.errors import BadInput
from trainledger.runtime.data import hashed
from trainledger.runtime.data import token_file as tokens
from trainledger.runtime.data.hashed import hash_of
from trainledger.runtime.data.prepare import TEXT_HASH, prepare
from trainledger.runtime.data.token_file import BYTES, TokenFile


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A day on, when all files have settled."""
    now_ns = hashed.time.time_ns
    monkeypatch.setattr(hashed.time, "time_ns", lambda: now_ns() + 86_400 * 10**9)


def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(file: TokenFile) -> str:
        raise AssertionError(f"{file.path} is read")

    monkeypatch.setattr(tokens.TokenFile, "_hash", read)


@pytest.mark.usefixtures("later")
def test_a_token_file_is_read_whole_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = token_file(tmp_path / "some.tokens", range(200)).verify()
    assert {path.name for path in tmp_path.iterdir()} == {"some.tokens", "some.tokens.hash"}
    unread(monkeypatch)
    assert TokenFile.open(file.path).verify() == file
    copied = shutil.copy2(file.path, tmp_path / "other.tokens")
    shutil.copy2(tmp_path / "some.tokens.hash", tmp_path / "other.tokens.hash")
    with pytest.raises(AssertionError, match="is read"):
        TokenFile.open(Path(copied)).verify()


@pytest.mark.usefixtures("later")
def test_tokens_that_were_altered_behind_its_back_are_found(tmp_path: Path) -> None:
    """The size is the same, and the time of writing is set back."""
    file = token_file(tmp_path / "some.tokens", range(200)).verify()
    before = file.path.stat()
    raw = bytearray(file.path.read_bytes())
    raw[-2] ^= 1
    file.path.write_bytes(raw)
    os.utime(file.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.path.stat().st_mtime_ns == before.st_mtime_ns
    with pytest.raises(BadInput, match="was altered: its tokens have SHA-256"):
        TokenFile.open(file.path).verify()


def test_a_file_that_was_just_written_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = token_file(tmp_path / "some.tokens", range(200)).verify()
    unread(monkeypatch)
    with pytest.raises(AssertionError, match="is read"):
        file.verify()


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("kept", [b"", b"[]", b'{"stamps": [], "sha256": "0"}'])
def test_a_record_that_says_nothing_is_written_anew(tmp_path: Path, kept: bytes) -> None:
    path, record = tmp_path / "text", tmp_path / "text.hash"
    path.write_text("text")
    record.write_bytes(kept)
    assert hash_of([path], lambda: "1", record) == "1"
    assert hash_of([path], lambda: "2", record) == "1"
    path.write_text("next")
    assert hash_of([path], lambda: "2", record) == "2"
    assert hash_of([path], lambda: "3", tmp_path / "absent" / "text.hash") == "3"


@pytest.mark.usefixtures("later")
def test_texts_that_were_prepared_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text(TEXT)
    prepare([text], BYTES, out, held_out=0.1)
    made = prepare([text], BYTES, out, held_out=0.1)
    assert (out / TEXT_HASH).exists()

    def read(texts: object) -> str:
        raise AssertionError(f"{texts} are read")

    unread(monkeypatch)
    monkeypatch.setattr(importlib.import_module("trainledger.runtime.data.prepare"), "_digest", read)
    assert prepare([text], BYTES, out, held_out=0.1) == made
    text.write_text(TEXT + "more")
    with pytest.raises(AssertionError, match="are read"):
        prepare([text], BYTES, out, held_out=0.1)
