r"""Fail when a tracked file names what it must not: see RULES.

    python scripts/check_names.py [FILE ...]        (default: every file that git tracks)

Each pattern is written with a one-letter class (`[D]`) or an escape, so that no pattern matches its own text.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

RULES = {
    "a package registry: name the package and let pip's own settings choose where it comes from": re.compile(
        r"py[p]i\.(?:org|python)|python[h]osted\.org|download\.py[t]orch\.org|np[m]js\.(?:org|com)|crate[s]\.io"
        r"|repo\.anacond[a]|conda\.anacond[a]|proxy\.golan[g]|--(?:extra-)?inde[x]-url|--find-link[s]"
    ),
    "a path of one machine: write it relative to the checkout": re.compile(
        r"(?:(?<![\w./:*-])|(?<=file://))/(?:roo[t]|hom[e]|wor[k]|tm[p]|User[s]|op[t])(?:/|\b(?![\w.-]))"
        r"|\b[A-Z]:\\User[s]\b"
    ),
    "unfinished work: finish it, or take it out and write the limit down where a reader looks": re.compile(
        r"\b(?:TOD[O]|FIXM[E]|XX[X])\b"
    ),
    "a test that does not run: make it run, delete it, or mark it gpu or proof": re.compile(
        r"\bpytest\.(?:mark\.)?(?:ski[p]|skipi[f]|xfai[l]|importorski[p])\b|@unittest\.ski[p]|\bskipTes[t]\("
        r"|\bSkipTes[t]\b|\bmark\.(?:ski[p]|skipi[f]|xfai[l])\b"
    ),
}


def tracked_files() -> list[Path]:
    """The files that git tracks and that are in the working tree."""
    listing = subprocess.run(["git", "ls-files", "-z"], check=True, capture_output=True, text=True).stdout
    return [path for name in listing.split("\0") if name and (path := Path(name)).is_file()]


def offences(path: Path) -> Iterator[str]:
    """One sentence for each line of a text file that breaks a rule; a file that is not UTF-8 text has none."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return
    for number, line in enumerate(text.splitlines(), start=1):
        for rule, pattern in RULES.items():
            if match := pattern.search(line):
                yield f"{path}:{number}: {match.group()!r} is {rule}"


def main(arguments: list[str]) -> int:
    """Print each offence; 1 if there is any."""
    try:
        files = [Path(argument) for argument in arguments] or tracked_files()
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"check_names: cannot list the tracked files: {error}; name the files to read", file=sys.stderr)
        return 2
    found = [sentence for path in files for sentence in offences(path)]
    print("\n".join(found) if found else f"check_names: {len(files)} files, nothing to say")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
