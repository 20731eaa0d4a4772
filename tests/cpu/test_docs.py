"""README and docs are true: examples run, commands and files exist, tables are those of the results."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torchtitan_library

from prime_kernels import cli

REPO = Path(__file__).resolve().parents[2]
PAGES = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md")), REPO / "patches" / "README.md"]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")
CODE_SPAN = re.compile(r"`([^`\n]+)`")
# Pages describe this version.
PROMISE = re.compile(
    r"\b(?:will be|coming soon|planned|in the future|upcoming|roadmap|to be added)\b", re.IGNORECASE
)
COMMAND = "python -m prime_kernels "


def marks_of(block: str) -> list[pytest.MarkDecorator]:
    marks = [pytest.mark.compile] if "compile_kernel" in block else []
    if "from transformers" in block:
        missing = importlib.util.find_spec("transformers") is None
        marks.append(pytest.mark.skipif(missing, reason="needs Transformers 5"))
    if "from torchtitan" in block:
        # Not by its name alone: it can be installed without what its MoE module imports.
        missing = any(importlib.util.find_spec(name) is None for name in torchtitan_library.PACKAGES)
        marks.append(pytest.mark.skipif(missing, reason="needs TorchTitan and what it imports"))
    return marks


def blocks(language: str, pages: list[Path]) -> list[object]:
    found = [
        pytest.param(page, block, id=f"{page.stem}-{number}", marks=marks_of(block))
        for page in pages
        for number, (tag, block) in enumerate(BLOCK.findall(page.read_text()))
        if tag == language
    ]
    assert found
    return found


@pytest.mark.parametrize(("page", "code"), blocks("python", PAGES[1:]))
def test_example_runs(page: Path, code: str, no_shared_buffers: None) -> None:
    torch.manual_seed(0)
    if "from torchtitan" in code:
        torchtitan_library.stand_in_for_kernels()
    exec(compile(code, str(page), "exec"), {"__name__": "example"})


def test_readme_example_is_ten_lines_and_trains(
    capsys: pytest.CaptureFixture[str], no_shared_buffers: None
) -> None:
    [code] = [block for tag, block in BLOCK.findall((REPO / "README.md").read_text()) if tag == "python"]
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    torch.manual_seed(0)
    variables: dict[str, object] = {}
    exec(code.replace("for step in range(50)", "for step in range(1)"), variables)
    first = float(capsys.readouterr().out.split()[1])
    torch.manual_seed(0)
    exec(code, variables)
    last = float(capsys.readouterr().out.split()[1])
    assert last < 0.8 * first


def commands() -> list[tuple[str, str]]:
    """Every `python -m prime_kernels ...` of the pages: in shell blocks and in code spans."""
    found = []
    for page in PAGES:
        text = page.read_text()
        lines = [line for tag, block in BLOCK.findall(text) if tag == "bash" for line in block.splitlines()]
        for span in [*lines, *CODE_SPAN.findall(BLOCK.sub("", text))]:
            _, mark, rest = span.partition(COMMAND)
            if mark:
                found.append((page.name, rest.partition("#")[0].strip()))
    return found


@pytest.mark.parametrize(("page", "words"), sorted(set(commands())))
def test_command_exists(page: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = shlex.split(words)
    names = []
    for word in arguments:
        if word.startswith("-") or len(names) > 1:
            break
        names.append(word)
    if "bench" not in names:
        names = names[:1]
    with pytest.raises(SystemExit) as stop:
        cli.main([*names, "--help"])
    assert stop.value.code == 0
    help_text = capsys.readouterr().out
    for word in arguments:
        if word.startswith("--"):
            assert word in help_text, f"{page}: {words}"


def test_links_lead_somewhere() -> None:
    dead = [
        f"{page.name}: {target}"
        for page in PAGES
        for target in LINK.findall(page.read_text())
        if not (page.parent / target).exists()
    ]
    assert dead == []


GENERATED = ("_vendor", "runs", ".venv", "_aot")


def test_files_that_pages_name_exist() -> None:
    roots = {path.name for path in REPO.iterdir()}
    suffixes = {".py", ".sh", ".md", ".json", ".cuh", ".h"}
    package = REPO / "prime_kernels"
    missing = []
    for page in PAGES:
        for span in CODE_SPAN.findall(BLOCK.sub("", page.read_text())):
            path = Path(span.split()[0])
            if set(GENERATED) & set(path.parts) or "*" in span:
                continue
            named = path.suffix in suffixes and len(path.parts) > 1
            if (named or path.parts[0] in roots) and not any(
                (base / path).exists() for base in (REPO, package)
            ):
                missing.append(f"{page.name}: {span}")
    assert missing == []


def test_no_promises() -> None:
    assert [f"{page.name}: {match}" for page in PAGES for match in PROMISE.findall(page.read_text())] == []


def test_tables_are_those_of_the_results() -> None:
    command = [sys.executable, REPO / "ci" / "tables.py", "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_page_on_kernels_names_every_shared_header() -> None:
    page = (REPO / "docs" / "how-to-add-a-kernel.md").read_text()
    headers = (REPO / "prime_kernels" / "include" / "prime_kernels").iterdir()
    assert [path.name for path in headers if f"`{path.name}`" not in page] == []
