"""The text that ships for demonstrations is what its page says, and its tokenizer comes from it."""

import hashlib
import subprocess
import sys
from pathlib import Path

from tokenizers import Tokenizer

ROOT = Path(__file__).parent.parent
DATA = ROOT / "examples" / "data"
TEXT = DATA / "tinyshakespeare.txt"


def test_the_text_is_the_one_whose_source_is_written_down() -> None:
    whole = TEXT.read_bytes()
    page = (DATA / "README.md").read_text()
    assert hashlib.sha256(whole).hexdigest() in page
    assert f"{len(whole):,} bytes" in page
    assert whole.isascii()


def test_the_tokenizer_is_made_from_the_text_by_the_script(tmp_path: Path) -> None:
    out = tmp_path / "tokenizer.json"
    script = [sys.executable, str(ROOT / "scripts" / "train_tokenizer.py"), str(TEXT)]
    subprocess.run([*script, "--vocab-size", "512", "--out", str(out)], check=True, capture_output=True, timeout=50)
    assert out.read_bytes() == (DATA / "tokenizer.json").read_bytes()
    tokenizer = Tokenizer.from_file(str(out))
    part = TEXT.read_text()[-20_000:]
    ids = tokenizer.encode(part).ids
    assert tokenizer.decode(ids) == part
    assert len(ids) < 0.55 * len(part)
