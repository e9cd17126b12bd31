"""The pages: what they show is what the commands print, every link leads somewhere, nothing is left out."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from trainledger.cli.verbs import VERBS
from trainledger.facts import families
from trainledger.facts.cluster import accelerator_names, cluster_names
from trainledger.facts.families import FAMILY_FILES, model_types
from trainledger.rules import ELSEWHERE, RULES

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(str(path.relative_to(ROOT)) for path in (*DOCS.rglob("*.md"), *ROOT.glob("*.md")))
CONSOLE = re.compile(r"```console\n\$ (?P<command>[^\n]+)\n(?P<output>.*?)```\n", re.DOTALL)
MEANT = re.compile(r"error: (?:\[[a-z0-9-]+\] |examples/own-card\.toml has no peak\.fp8)")
"""Errors that a page shows on purpose: a rule refuses, or a fact is missing."""


@pytest.fixture(scope="module", autouse=True)
def scripts_on_the_path() -> Iterator[None]:
    sys.path.insert(0, str(ROOT / "scripts"))
    yield
    sys.path.remove(str(ROOT / "scripts"))


@pytest.fixture(scope="module")
def docs() -> ModuleType:
    return importlib.import_module("docs")


@pytest.fixture(scope="module")
def executed() -> ModuleType:
    return importlib.import_module("pages.executed")


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_says_what_is_true_now(docs: ModuleType, page: str) -> None:
    made = {known.path: known for known in docs.PAGES}
    if page in made:
        assert text_of(page) == made[page].text(), f"{page} is out of date: run `make docs` and commit it"
    else:
        assert "```console" not in text_of(page), f"{page} shows commands, so enter it in scripts/docs.py"


def test_every_generated_page_is_there(docs: ModuleType) -> None:
    assert {page.path for page in docs.PAGES} <= set(PAGES)


def test_a_stale_page_is_found(docs: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "same.md").write_text("new", encoding="utf-8")
    (tmp_path / "old.md").write_text("old", encoding="utf-8")
    pages = tuple(docs.Page(name, lambda: "new") for name in ("same.md", "old.md", "missing.md"))
    assert docs.stale(pages, tmp_path) == [(tmp_path / "old.md", "new"), (tmp_path / "missing.md", "new")]


def prose(text: str) -> str:
    """A page without its code."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def links(page: str) -> Iterator[tuple[Path, str]]:
    """(file, anchor) of every link of a page that stays in the repository."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(text_of(page))):
        if not target.startswith(("https://", "http://")):
            path, _, anchor = target.partition("#")
            yield (((ROOT / page).parent / path).resolve() if path else ROOT / page), anchor


def anchors(path: Path) -> set[str]:
    """What the headings of a page are called in a link."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    for path, anchor in links(page):
        assert path.exists(), f"{page} links to {path}"
        assert not anchor or anchor in anchors(path), f"{page}: {path.name} has no heading for #{anchor}"


def test_the_index_names_every_page() -> None:
    linked = {path for path, _ in links("docs/index.md")}
    assert {path.resolve() for path in DOCS.rglob("*.md")} - linked == {(DOCS / "index.md").resolve()}


def blocks(page: str) -> list[tuple[str, str]]:
    """(command, output) of every console block."""
    return CONSOLE.findall(text_of(page))


def test_every_verb_is_explained_and_shown() -> None:
    commands = [tuple(command.split()) for page in PAGES for command, _ in blocks(page)]
    for verb in VERBS:
        typed = ("trainledger", *verb.words)
        assert f"| `trainledger {verb.name} " in text_of("docs/cli.md")
        assert f"`{verb.name}" in text_of("README.md")
        assert any(command[: len(typed)] == typed for command in commands)


def test_every_rule_is_explained() -> None:
    page = text_of("docs/rules.md")
    for rule in RULES:
        assert f"| `{rule.id}` | {rule.severity} |" in page
    for one in ELSEWHERE:
        assert f"| `{one.id}` | {one.about} |" in page
    known = {one.id for one in (*RULES, *ELSEWHERE)}
    refused = {
        rule for page in PAGES for _, output in blocks(page) for rule in re.findall(r"error: \[([^\]]+)\]", output)
    }
    assert refused <= known
    assert len(refused) >= 5


def test_no_command_breaks_unless_that_is_its_point() -> None:
    for page in PAGES:
        for command, output in blocks(page):
            assert "Traceback" not in output, command
            assert all(MEANT.match(line) for line in output.splitlines() if line.startswith("error:")), command


def test_files_shown_are_the_files() -> None:
    found = {
        name: body
        for page in PAGES
        for name, body in re.findall(r"`(examples/[\w.-]+\.toml)`:\n\n```toml\n(.*?)```", text_of(page), re.DOTALL)
    }
    assert {"examples/own-card.toml", "examples/qwen2.5-32b-16xh100.toml"} <= set(found)
    assert found == {name: text_of(name) for name in found}


@pytest.mark.parametrize("page", ["docs/accounting.md", "docs/parallelism.md", "docs/communication.md"])
def test_a_worked_problem_agrees_with_the_ledger(page: str) -> None:
    """Every large figure that the arithmetic by hand prints, the ledger prints too."""
    worked = text_of(page).split("## Worked problem")[1]
    found = CONSOLE.findall(worked)
    by_hand = {n for command, output in found if command.startswith("python") for n in re.findall(r"\d{7,}", output)}
    ledger = {n for command, output in found if "--json" in command for n in re.findall(r"\d{7,}", output)}
    assert len(by_hand) >= 3
    assert by_hand <= ledger


def test_a_block_is_replaced_by_what_its_command_prints(executed: ModuleType) -> None:
    page = "before\n\n```console\n$ python -c \"print('a | b')\"\nold\n```\n\n```toml\nx = 1\n```\n"
    assert executed.refresh(page) == page.replace("old", "a | b")


def test_a_pipe_carries_output_and_head_cuts_it(executed: ModuleType) -> None:
    count = "import sys; print(len(sys.stdin.read().splitlines()))"
    assert executed.output_of(f"python -c 'print(1); print(2)' | python -c '{count}'") == "2\n"
    assert executed.output_of("python -c 'print(1); print(2)' | head -1") == "1\n"


def test_errors_come_after_the_output(executed: ModuleType) -> None:
    said = executed.output_of("trainledger model no-such-model")
    assert said.startswith("error: ")
    assert said.count("\n") == 1


def test_no_other_program_is_run(executed: ModuleType) -> None:
    with pytest.raises(SystemExit, match="a console block runs 'rm'"):
        executed.output_of("rm -r somewhere")


def test_a_bracket_may_cite_several_keys() -> None:
    keys = importlib.import_module("pages.formulas").keys
    known = frozenset({"megatron", "deepspeed", "te-cp"})
    assert list(keys("megatron: a.py 12; deepspeed: b.py", known)) == [("megatron", "a.py 12"), ("deepspeed", "b.py")]
    assert list(keys("megatron, te-cp", known)) == [("megatron", ""), ("te-cp", "")]
    assert list(keys("plans, rows", known)) == []


def test_the_numbers_of_the_readme_are_counted() -> None:
    modules = [importlib.import_module(f"{families.__name__}.{file}") for file, _ in FAMILY_FILES]
    text = " ".join(text_of("README.md").split())
    count = sum(len(module.FAMILIES) for module in modules)
    assert f"Models: {count} decoder families ({len(model_types())} values of `model_type`)" in text
    assert f"{len(accelerator_names())} accelerators and {len(cluster_names())} clusters" in text


def row_of(page: str, name: str) -> list[str]:
    return next(line.split(" | ") for line in text_of(page).splitlines() if line.startswith(f"| {name} | "))


def test_what_no_source_states_is_a_dash_and_what_is_lacking_is_none() -> None:
    assert row_of("docs/hardware.md", "H800-SXM5-80GB")[1] == "-"
    assert "memory.usable" in text_of("docs/hardware.md").split("### H800-SXM5-80GB")[1].split("###")[0]
    assert row_of("docs/hardware.md", "B300-SXM")[1].endswith("`a`")
    assert any(cell.startswith("none ") for cell in row_of("docs/hardware.md", "RTX-4090"))
    assert row_of("docs/models.md", "mixtral-8x7b")[2:5] == ["46,702,792,704", "12,879,925,248", "32 (32 with experts)"]
