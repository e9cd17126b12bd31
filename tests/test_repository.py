"""What the repository promises about itself: its commands, its public names, how lean and how fast its import is."""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
import time
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import trainledger
from trainledger import errors

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "trainledger"
HEAVY = ("torch", "scipy", "pandas", "rich", "litestar")
TOUCH_ALL = "import trainledger\nfor name in trainledger.__all__: getattr(trainledger, name)"


def run_python(code: str) -> str:
    """What a fresh interpreter prints when it runs this with the package at hand."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def heavy_modules_after(code: str) -> set[str]:
    report = f"\nimport sys; print(*[name for name in {HEAVY} if name in sys.modules])"
    return set(run_python(code + report).split())


def median_seconds(code: str) -> float:
    times: list[float] = []
    for _ in range(3):
        start = time.perf_counter()
        run_python(code)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def makefile_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", ".ci/run"])
def test_every_make_target_a_page_names_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    commands = set(re.findall(r"(?:^\s*|`)make (?:-k )?([a-z][a-z-]*)", text, re.MULTILINE))
    assert commands
    assert commands <= makefile_targets()


def test_an_old_python_is_refused_with_a_sentence(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    old = tmp_path / "old-python"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.9.1"\n[ "$1" != -c ]\n', encoding="utf-8")
    old.chmod(0o755)
    done = subprocess.run(
        ["make", ".venv/bin/python", "PYTHON=./old-python"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "needs Python 3.11 or newer; ./old-python is Python 3.9.1" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_every_requirement_is_pinned_for_the_tests() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = {
        re.split(r"[<>=!~\[ ]", line)[0] for line in project["dependencies"] + project["optional-dependencies"]["dev"]
    }
    pins = (ROOT / "constraints" / "test.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.split("==")[0] for line in pins if "==" in line}
    assert asked <= pinned
    assert not [line for line in pins if line and not line.startswith("#") and "==" not in line]


def test_the_changelog_knows_this_version() -> None:
    assert f"\n## {trainledger.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_every_package_folder_is_a_package() -> None:
    # Without __init__.py a folder still imports, but the layers contract and pytest do not see what is in it.
    bare = {path.parent for path in SOURCE.rglob("*.py") if not (path.parent / "__init__.py").exists()}
    assert not bare


def test_public_names_are_few_sorted_and_there() -> None:
    names = trainledger.__all__
    assert names == sorted(names)
    assert len(names) <= 20
    assert all(getattr(trainledger, name) is not None for name in names)
    assert dir(trainledger) == names


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'load_models'; it offers .*load_model"):
        trainledger.load_models  # noqa: B018  # pyright: ignore[reportUnusedExpression, reportAttributeAccessIssue]


@pytest.mark.parametrize("code", ["import trainledger", TOUCH_ALL], ids=["import", "every name"])
def test_the_import_is_lean(code: str) -> None:
    assert heavy_modules_after(code) == set()


def test_the_lean_check_can_fail() -> None:
    assert heavy_modules_after("import trainledger, rich.console") == {"rich"}


def test_the_import_is_quick() -> None:
    assert median_seconds("import trainledger") - median_seconds("pass") < 0.3


def drawn_errors() -> dict[str, tuple[str, int]]:
    """Name -> (parent, exit code), as the docstring of errors.py draws them."""
    parents: list[tuple[int, str]] = []
    drawn: dict[str, tuple[str, int]] = {}
    for indent, name, code in re.findall(r"^( *)([A-Z]\w+) +exit (\d)", errors.__doc__ or "", re.MULTILINE):
        parents = [parent for parent in parents if parent[0] < len(indent)]
        drawn[name] = (parents[-1][1] if parents else "Exception", int(code))
        parents.append((len(indent), name))
    return drawn


def test_the_errors_are_those_that_are_drawn() -> None:
    """Nothing derives from the base anywhere else in the package either."""
    for path in SOURCE.rglob("*.py"):
        if path.stem != "__main__":
            import_module(".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__"))
    found: dict[str, tuple[str, int]] = {}
    open_to_look = [errors.TrainledgerError]
    while open_to_look:
        error = open_to_look.pop()
        open_to_look += error.__subclasses__()
        found[error.__name__] = (error.__mro__[1].__name__, error.exit_code)
    assert found == drawn_errors()


def run_script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / name), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


LONG_FUNCTION = "def sprawl():\n" + "    x = 1\n" * 50
LONG_CLASS = "class Sprawl:\n" + "    x = 1\n" * 200
LONG_FILE = "x = 1\n" * 401


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (LONG_FUNCTION, "51 lines, limit  50  function"),
        ("class A:\n  async " + LONG_FUNCTION.replace("\n", "\n  ").rstrip(), "51 lines, limit  50  function"),
        (LONG_CLASS, "201 lines, limit 200  class"),
        (LONG_FILE, "401 lines, limit 400  file"),
    ],
)
def test_size_finds_what_is_too_long(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "long.py").write_text(text, encoding="utf-8")
    found = run_script("size.py", str(tmp_path))
    assert found.returncode == 1
    assert complaint in found.stdout
    assert "1 too long" in found.stdout


@pytest.mark.parametrize("text", [LONG_FUNCTION, LONG_CLASS, LONG_FILE])
def test_size_lets_the_limit_itself_pass(tmp_path: Path, text: str) -> None:
    one_line_less = "\n".join(text.splitlines()[:-1])
    (tmp_path / "long.py").write_text(one_line_less, encoding="utf-8")
    assert run_script("size.py", str(tmp_path)).returncode == 0


def test_size_refuses_a_folder_that_is_not_there() -> None:
    found = run_script("size.py", "sources")
    assert found.returncode == 2
    assert "no such file or folder: sources" in found.stderr


# A bar is taken out before use: with it, this file holds nothing that it must not.
FORBIDDEN = [
    "pip install --ind|ex-url x",
    "https://py|pi.org/simple/numpy",
    "https://files.python|hosted.org/x.whl",
    "https://download.py|torch.org/whl/cpu",
    'path = "/ro|ot/models"',
    "cd /wo|rk && ls",
    "--out=/t|mp/x",
    "/ho|me/jane/.cache",
    "/Us|ers/jane",
    "file:///ro|ot/x",
    "# TO|DO: later",
    "FIX|ME",
    "@pytest.mark.sk|ip",
    "@pytest.mark.sk|ipif(True)",
    "@pytest.mark.xf|ail",
    'pytest.sk|ip("no")',
    'pytest.import|orskip("torch")',
    "@unittest.sk|ipIf",
]
ALLOWED = [
    "https://example.com/home-page/paper.pdf",
    "https://github.com/a/b/blob/main/home/x.py",
    "docs/tmp/x",
    "the root of a/root",
    "a homework/exercise",
    "work/home balance",
    "rows that are skipped",
    "https://pytorch.org/docs",
    "todo",
    "XXXL",
]


@pytest.mark.parametrize("line", FORBIDDEN)
def test_check_names_finds(tmp_path: Path, line: str) -> None:
    (tmp_path / "page.md").write_text("fine\n" + line.replace("|", ""), encoding="utf-8")
    found = run_script("check_names.py", str(tmp_path / "page.md"))
    assert found.returncode == 1
    assert "page.md:2:" in found.stdout


def test_check_names_passes_what_only_looks_alike(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("\n".join(ALLOWED), encoding="utf-8")
    found = run_script("check_names.py", str(tmp_path / "page.md"))
    assert found.returncode == 0, found.stdout


def test_check_names_does_not_find_itself() -> None:
    assert run_script("check_names.py", "scripts/check_names.py", "tests/test_repository.py").returncode == 0
