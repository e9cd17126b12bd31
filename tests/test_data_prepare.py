"""From text to token files: what comes out, what is refused, and that a folder is whole or not there."""

import hashlib
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from data_files import TEXT, text_file, tokenizer_json
from trainledger.errors import BadInput
from trainledger.runtime.data import Prepared, prepare
from trainledger.runtime.data import tokenizer as pieces


def parts(prepared: Prepared) -> tuple[bytes, bytes]:
    """Both parts of tokens that are bytes."""
    held_out = prepared.held_out.tokens().tolist() if prepared.held_out else []
    return bytes(prepared.train.tokens().tolist()), bytes(held_out)


def both(prepared: Prepared) -> list[int]:
    assert prepared.held_out is not None
    return prepared.train.tokens().tolist() + prepared.held_out.tokens().tolist()


def test_bytes_come_back_as_they_were_and_the_end_is_held_out(tmp_path: Path) -> None:
    text = text_file(tmp_path / "a.txt")
    prepared = prepare([text], "bytes", tmp_path / "out", held_out=0.1)
    assert bytes(both(prepared)) == TEXT.encode()
    assert prepared.held_out is not None
    held_out = bytes(prepared.held_out.tokens().tolist()).decode()
    assert TEXT.endswith(held_out)
    assert held_out.splitlines()[0] in TEXT.splitlines(), "it starts with a line"
    assert 0.1 * len(TEXT) - 60 < len(held_out) <= 0.1 * len(TEXT)


LINES = st.lists(st.text(st.characters(codec="utf-8"), max_size=9), min_size=4, max_size=30)


@given(
    texts=st.lists(LINES, min_size=1, max_size=3), held_out=st.sampled_from([0.0, 0.25, 0.5]), piece=st.integers(1, 64)
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
def test_no_byte_is_lost_or_read_twice(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    texts: list[list[str]],
    held_out: float,
    piece: int,
) -> None:
    """A text is its two parts, and the parts of several texts are those of each in turn."""
    folder = tmp_path_factory.mktemp("it")
    monkeypatch.setattr(pieces, "PIECE_BYTES", piece)
    paths, alone = [], []
    for index, lines in enumerate(texts):
        whole = "".join(f"{line}\n" for line in [*lines, *["end"] * len("".join(lines).encode())]).encode()
        paths.append(folder / f"{index}.txt")
        paths[-1].write_bytes(whole)
        alone.append(parts(prepare(paths[-1:], "bytes", folder / f"{index}", held_out=held_out)))
        assert b"".join(alone[-1]) == whole
    together = parts(prepare(paths, "bytes", folder / "all", held_out=held_out))
    assert together == tuple(b"".join(part) for part in zip(*alone, strict=True))


def test_a_tokenizer_json_makes_the_tokens_that_its_library_makes(tmp_path: Path) -> None:
    path = tokenizer_json(tmp_path / "tokenizer.json")
    prepared = prepare([text_file(tmp_path / "a.txt")], str(path), tmp_path / "out", held_out=0.2)
    loaded = Tokenizer.from_file(str(path))
    assert loaded.decode(both(prepared)) == TEXT
    facts = prepared.train.facts
    assert facts.vocab_size == loaded.get_vocab_size()
    assert facts.tokenizer == hashlib.sha256(path.read_bytes()).hexdigest()
    assert facts.count < len(TEXT) / 2, "it joins bytes"


def test_a_text_of_many_pieces_has_the_tokens_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces end with a line, and characters of several bytes are whole."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 16)
    text = "süß und schön 日本語\nThe second line.\n" * 20
    path = tokenizer_json(tmp_path / "tokenizer.json", text=text)
    prepared = prepare([text_file(tmp_path / "a.txt", text)], str(path), tmp_path / "out", held_out=0.0)
    assert prepared.held_out is None
    assert Tokenizer.from_file(str(path)).decode(prepared.train.tokens().tolist()) == text


def test_the_same_text_again_is_read_and_not_made_again(tmp_path: Path) -> None:
    text = text_file(tmp_path / "a.txt")
    first = prepare([text], "bytes", tmp_path / "out", held_out=0.1)
    before = first.train.path.stat()
    assert prepare([text], "bytes", tmp_path / "out", held_out=0.1) == first
    after = first.train.path.stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


@pytest.mark.parametrize(
    ("text", "bytes_", "held_out", "said"),
    [
        (TEXT + "more\n", True, 0.1, "prepared with another text;"),
        (TEXT, False, 0.1, "prepared with another tokenizer;"),
        (TEXT, True, 0.2, "prepared with another held-out share;"),
        (TEXT[1:], False, 0.1, "prepared with another text and tokenizer;"),
    ],
)
def test_a_folder_of_other_tokens_is_refused_and_left_alone(
    tmp_path: Path, text: str, bytes_: bool, held_out: float, said: str
) -> None:
    made = prepare([text_file(tmp_path / "a.txt")], "bytes", tmp_path / "out", held_out=0.1)
    other = text_file(tmp_path / "b.txt", text)
    tokenizer = "bytes" if bytes_ else str(tokenizer_json(tmp_path / "tokenizer.json"))
    with pytest.raises(BadInput, match=said):
        prepare([other], tokenizer, tmp_path / "out", held_out=held_out)
    made.train.verify()


def test_a_file_that_was_altered_since_is_refused(tmp_path: Path) -> None:
    text = text_file(tmp_path / "a.txt")
    path = prepare([text], "bytes", tmp_path / "out", held_out=0.1).train.path
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(BadInput, match="was altered"):
        prepare([text], "bytes", tmp_path / "out", held_out=0.1)


def test_what_fails_halfway_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = text_file(tmp_path / "a.txt")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(BadInput, match=rf"{tmp_path}/out cannot be written: No space left on device; make room"):
            prepare([text], "bytes", tmp_path / "out", held_out=0.1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt"]


def test_of_two_that_prepare_at_once_one_publishes_and_both_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, out, sync = text_file(tmp_path / "a.txt"), tmp_path / "out", os.fsync

    def overtaken(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", sync)
        prepare([text], "bytes", out, held_out=0.1)

    monkeypatch.setattr(os, "fsync", overtaken)
    assert bytes(both(prepare([text], "bytes", out, held_out=0.1))) == TEXT.encode()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "out"]


@pytest.mark.parametrize(
    ("held_out", "said"), [(-0.1, "held-out is -0.1"), (0.6, "held-out is 0.6"), (float("nan"), "held-out is nan")]
)
def test_a_share_that_is_none_is_refused(tmp_path: Path, held_out: float, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        prepare([text_file(tmp_path / "a.txt")], "bytes", tmp_path / "out", held_out=held_out)


def test_texts_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no text is named"):
        prepare([], "bytes", tmp_path / "out", held_out=0.1)
    with pytest.raises(BadInput, match=r"missing\.txt cannot be read as text"):
        prepare([tmp_path / "missing.txt"], "bytes", tmp_path / "out", held_out=0.1)
    with pytest.raises(BadInput, match=r"the train part of \S*a\.txt \(0 B\) has no token; give more text"):
        prepare([text_file(tmp_path / "a.txt", "")], "bytes", tmp_path / "out", held_out=0.1)
    with pytest.raises(BadInput, match=r"b\.txt \(23 B\) has no token: it is the lines that begin in the last 0\.1"):
        prepare([text_file(tmp_path / "b.txt", "one line without an end")], "bytes", tmp_path / "out", held_out=0.1)


@pytest.mark.parametrize("held_out", [0.0, 0.1])
def test_a_text_that_has_no_end_is_refused_and_not_read(tmp_path: Path, held_out: float) -> None:
    os.mkfifo(tmp_path / "pipe")
    for text in (Path("/dev/zero"), tmp_path / "pipe"):
        with pytest.raises(BadInput, match=rf"{text} is no regular file.*; write it into one"):
            prepare([text], "bytes", tmp_path / "out", held_out=held_out)


def test_a_text_that_is_not_utf_8_is_refused_with_the_place(tmp_path: Path) -> None:
    path = tokenizer_json(tmp_path / "tokenizer.json")
    text = tmp_path / "a.txt"
    text.write_bytes(TEXT.encode() + b"na\xefve\n" + TEXT.encode())
    with pytest.raises(BadInput, match=rf"a\.txt is not UTF-8 at byte {len(TEXT) + 2}"):
        prepare([text], str(path), tmp_path / "out", held_out=0.1)
    prepare([text], "bytes", tmp_path / "out", held_out=0.1)


@pytest.mark.parametrize(("content", "said"), [(None, "cannot be read"), ("{}", "is not a tokenizer.json")])
def test_a_tokenizer_that_is_none_is_refused(tmp_path: Path, content: str | None, said: str) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(BadInput, match=said):
        prepare([text_file(tmp_path / "a.txt")], str(path), tmp_path / "out", held_out=0.1)
