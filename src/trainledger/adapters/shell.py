"""The words of a shell's text: comments left out, what it assigns put in where it is named, and nothing run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

LONGEST = 1 << 18
"""Characters that are read, and that variables may grow a text to."""
DEPTH = 5
"""How often a value may itself name a variable."""
BREAK = "\n"
"""The word that ends a command."""
PRINTS = ("echo", "printf")
"""Commands whose words are of no program."""
_ASSIGNED = re.compile(
    r"^[ \t]*(?:export[ \t]+)?([A-Za-z_][A-Za-z0-9_]*)="
    r"(\"[^\"]*\"|'[^']*'|\$\(\([^)\n]*\)\)|\$\{[^}\n]*\}|[^\s;&|(\"']+)(?=[\s;&|]|$)",
    re.MULTILINE,
)
_NAMED = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}\n]{0,200}))?\}|([A-Za-z_][A-Za-z0-9_]*))")
_ARRAY = re.compile(r"\"?\$\{[A-Za-z_][A-Za-z0-9_]*\[[@*]\]\}\"?")
_SUM = re.compile(r"\$\(\(([0-9*+ ]{1,40})\)\)")
_FLAGS = re.compile(r"(?:^|[\s=])--[A-Za-z]")
_OWN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\+?=")
_STREAM = re.compile(r"(?<=\s)[0-9](?=>)")
"""The number of a stream that is sent elsewhere."""
_SEPARATORS = ";&|<>()\n"


def uncommented(text: str) -> str:
    r"""The text without comments, lines that go on joined.

    >>> uncommented("a --b 1 # --c\n# --d\n'#e' \\\n--f $#")
    "a --b 1\n\n'#e'  --f $#"
    """
    lines = [line if "#" not in line else _before_comment(line) for line in text[:LONGEST].splitlines()]
    return re.sub(r"\\\n", " ", "\n".join(lines))


def _before_comment(line: str) -> str:
    quote = ""
    for at, char in enumerate(line):
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char == "#" and (at == 0 or line[at - 1].isspace()):
            return line[:at].rstrip()
    return line


def words(text: str) -> Iterator[str]:
    r"""The words of an uncommented text and a BREAK after each command; a quoted word of flags is split as well.

    >>> list(words("N=2\nt --a $N --b 2>&1 | tee x"))[3:]
    ['--a', '2', '--b', '\n', '1', '\n', 'tee', 'x', '\n']
    """
    deep, starts, prints = 0, True, False
    for word in _split(filled(text)):
        if not word.strip(_SEPARATORS):
            deep = max(deep + word.count("(") - word.count(")"), 0)
            starts = not (deep and word == BREAK)
            prints = prints and not starts
            if starts:
                yield BREAK
        elif not prints and not (starts and word in PRINTS):
            starts = False
            yield from _inner(word)
        else:
            prints = True


def _inner(word: str) -> Iterator[str]:
    """A word, or those inside of it where it was quoted around flags."""
    if not any(char.isspace() for char in word) or _FLAGS.search(word) is None:
        yield word
        return
    own = _OWN.match(word)
    yield BREAK
    yield from (part for part in _split(word[own.end() :] if own is not None else word) if part.strip(_SEPARATORS))
    yield BREAK


def _split(text: str) -> list[str]:
    text = _STREAM.sub("", text)
    lexer = shlex.shlex(text, posix=True, punctuation_chars=_SEPARATORS)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    try:
        return [*lexer, BREAK]
    except ValueError:
        # an apostrophe in a sentence around the command
        return [*(part for line in text.splitlines() for part in (*line.split(), BREAK))]


def filled(text: str) -> str:
    """The text with what it assigns put in; other names stay, and those that it assigns in several ways."""
    values: dict[str, str] = {}
    several: set[str] = set()
    for name, written in _ASSIGNED.findall(text):
        plain = written.strip("\"'")
        own = _NAMED.fullmatch(plain)
        # NAME=${NAME:-4} is 4 unless the environment says otherwise
        plain = own[2] if own is not None and own[1] == name and own[2] else plain
        if values.setdefault(name, plain) != plain:
            several.add(name)

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        return match[0] if name in several else values.get(name, match[2] or match[0])

    for _ in range(DEPTH):
        grown = len(text) + sum(len(value(match)) for match in _NAMED.finditer(text))
        changed = text if grown > LONGEST else _SUM.sub(_summed, _NAMED.sub(value, text))
        if changed == text:
            break
        text = changed
    return _ARRAY.sub(" ", text)


def _summed(match: re.Match[str]) -> str:
    """Products and sums of a shell, such as $((8*2)); as it is where it is another."""
    total = 0
    for part in match[1].split("+"):
        product = 1
        for factor in part.split("*"):
            if not factor.strip().isdigit():
                return match[0]
            product *= int(factor)
        total += product
    return str(total)
