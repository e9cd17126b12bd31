"""Token files: what was written is read, and what is foreign, altered or cut off is refused with its name."""

import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_files import token_file
from trainledger.errors import BadInput
from trainledger.runtime.data.token_file import START_BYTES, TokenFile, header

TOKENS = [7, 250, 0, 3, 3, 9]


@given(tokens=st.lists(st.integers(0, 99_999), min_size=1, max_size=50), vocab=st.sampled_from([100_000, 65_536]))
def test_tokens_are_read_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, tokens: list[int], vocab: int
) -> None:
    below = [token % vocab for token in tokens]
    file = token_file(tmp_path_factory.mktemp("it") / "some.tokens", below, vocab).verify()
    assert file.tokens().tolist() == below
    assert file.tokens().dtype.itemsize == (4 if vocab > 1 << 16 else 2)


def test_tokens_are_mapped_and_cannot_be_changed(tmp_path: Path) -> None:
    tokens = token_file(tmp_path / "some.tokens", TOKENS).tokens()
    assert isinstance(tokens, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


@pytest.mark.parametrize(("count", "seq", "sequences"), [(9, 4, 2), (8, 4, 1), (5, 4, 1), (4, 4, 0), (1, 4, 0)])
def test_a_sequence_needs_the_label_of_its_last_token(tmp_path: Path, count: int, seq: int, sequences: int) -> None:
    assert token_file(tmp_path / "some.tokens", [1] * count).sequences(seq) == sequences


@pytest.mark.parametrize(
    ("keep", "at", "put", "said"),
    [
        pytest.param(-2, 0, b"", "is cut off: 6 tokens take 4108 B and it has 4106 B", id="a token short"),
        pytest.param(START_BYTES, 0, b"", "is cut off", id="no tokens"),
        pytest.param(100, 0, b"", "is cut off: a header takes 4096 B and the file has 100 B", id="half a header"),
        pytest.param(0, 0, b"", "is not a token file: it starts with b''", id="empty"),
        pytest.param(None, START_BYTES + 12, b"\0\0", "is longer than it says", id="longer"),
        pytest.param(None, 0, b"PK\x03\x04", "is not a token file", id="foreign"),
        pytest.param(None, 8, b"\x02", "is a token file of version 2, and this release reads version 1", id="version"),
        pytest.param(None, 60, b"!", "was altered: its header is not", id="a byte of the header"),
        pytest.param(None, 12, b"\xff\xff", "was altered: its header is not", id="length of the header"),
        pytest.param(None, START_BYTES + 2, b"\x08", "was altered: its tokens have SHA-256", id="a token"),
    ],
)
def test_a_file_that_is_not_what_it_was_is_refused(
    tmp_path: Path, keep: int | None, at: int, put: bytes, said: str
) -> None:
    path = token_file(tmp_path / "some.tokens", TOKENS).path
    whole = path.read_bytes()[:keep]
    path.write_bytes(whole[:at] + put + whole[at + len(put) :])
    with pytest.raises(BadInput) as refused:
        TokenFile.open(path).verify()
    assert str(refused.value).startswith(f"{path} ")
    assert said in str(refused.value)


@given(at=st.integers(0, START_BYTES + 11), bit=st.integers(0, 7))
def test_no_bit_flips_unseen(tmp_path_factory: pytest.TempPathFactory, at: int, bit: int) -> None:
    """But those of the zeros after the facts, which nobody reads."""
    path = token_file(tmp_path_factory.mktemp("it") / "some.tokens", TOKENS).path
    whole = bytearray(path.read_bytes())
    used = START_BYTES - len(bytes(whole[:START_BYTES]).rstrip(b"\0"))
    whole[at] ^= 1 << bit
    path.write_bytes(bytes(whole))
    if START_BYTES - used <= at < START_BYTES:
        assert TokenFile.open(path).verify().tokens().tolist() == TOKENS
    else:
        with pytest.raises(BadInput):
            TokenFile.open(path).verify()


def test_facts_of_another_kind_are_refused(tmp_path: Path) -> None:
    file = token_file(tmp_path / "some.tokens", TOKENS)

    class More(msgspec.Struct):
        facts: str = "none"

    told = header(More())  # pyright: ignore[reportArgumentType]  # what a later release might write
    file.path.write_bytes(told + file.path.read_bytes()[START_BYTES:])
    with pytest.raises(BadInput, match="has a header that this release does not know"):
        TokenFile.open(file.path)


@pytest.mark.parametrize("name", ["missing.tokens", "."])
def test_a_path_without_a_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput, match="cannot be read as a token file"):
        TokenFile.open(tmp_path / name)


def test_a_run_is_checked_without_torch() -> None:
    code = (
        "import sys; import trainledger.runtime.data; sys.exit('torch' in sys.modules or 'tokenizers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
