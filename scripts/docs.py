"""Write the generated pages anew, or with --check say which of them are out of date.

    python scripts/docs.py [--check]

A page is a path and a function that returns its text; `PAGES` is the list; the functions are in `scripts/pages`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from pages import accuracy, cli, engines, executed, formulas, hardware, models, rules, rules_of_thumb, support

ROOT = Path(__file__).resolve().parent.parent
CHAPTERS = (
    "README.md",
    *(
        f"docs/{name}.md"
        for name in (
            "accounting",
            "memory",
            "parallelism",
            "communication",
            "proof",
            "training",
            "baselines",
            "checkpoints",
            "howto",
            "tutorial",
        )
    ),
)
"""Pages written by hand that show commands."""


class Page(NamedTuple):
    """A generated file, relative to the repository, and what makes its text."""

    path: str
    text: Callable[[], str]


def _executed(path: str) -> Page:
    """A page written by hand whose console blocks show what the commands print."""
    return Page(path, lambda: executed.refresh((ROOT / path).read_text(encoding="utf-8")))


PAGES: tuple[Page, ...] = (
    Page("docs/cli.md", cli.render),
    Page("docs/engines.md", engines.render),
    Page("docs/rules.md", rules.render),
    Page("docs/support.md", support.render),
    Page("docs/accuracy.md", accuracy.render),
    Page("docs/rules-of-thumb.md", rules_of_thumb.render),
    Page("docs/models.md", models.render),
    Page("docs/hardware.md", hardware.render),
    Page("docs/formulas.md", formulas.render),
    *map(_executed, CHAPTERS),
)


def stale(pages: tuple[Page, ...], root: Path) -> list[tuple[Path, str]]:
    """The pages whose file is missing or says something else, and what they should say."""
    found: list[tuple[Path, str]] = []
    for page in pages:
        path, text = root / page.path, page.text()
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            found.append((path, text))
    return found


def main(arguments: list[str]) -> int:
    """Write or check; the exit status is 1 when a check finds a stale page."""
    if arguments not in ([], ["--check"]):
        print("usage: python scripts/docs.py [--check]", file=sys.stderr)
        return 2
    old = stale(PAGES, ROOT)
    for path, text in old:
        name = path.relative_to(ROOT)
        if arguments:
            print(f"docs: {name} is out of date; run `make docs` and commit it")
        else:
            path.write_text(text, encoding="utf-8")
            print(f"docs: wrote {name}")
    return 1 if old and arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
