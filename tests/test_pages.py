"""The documentation is true where a machine can tell: programs run, commands parse, links lead somewhere, messages are
those of the code, and the site shows every page.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import re
import runpy
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from ftopt.checkpoint.manifest import FORMAT
from ftopt.cli.main import VERBS
from ftopt.config.loader import examined, load
from ftopt.config.shipped import shipped
from ftopt.sync.protocol.messages import PROTOCOL
from ftopt.sync.server.journal import _HEADING
from tests.pages import PAGES, ROOT, anchors, blocks, links, named, programs, prose, quotations

RUN_ELSEWHERE = {
    "docs/comparison.md": "tests/integrations/test_comparison.py",
    "docs/launching.md": "tests/ray/test_trainer.py",
    "docs/recipes.md": "tests/run/test_recipes_page.py",
    "docs/trainers.md": "tests/integrations/test_examples.py",
    "docs/watching.md": "tests/watch/test_curves.py",
}
"""Pages whose programs need more than this test has, and what runs them."""
COMING: set[str] = set()
"""Pages that may be linked to and be shown by the site before they are there."""

every_page = pytest.mark.parametrize("page", PAGES, ids=named)


@every_page
def test_the_programs_of_a_page_run_one_after_the_other(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    if named(page) in RUN_ELSEWHERE:
        assert not programs(page) or (ROOT / RUN_ELSEWHERE[named(page)]).is_file()
        return
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in programs(page):
        code = compile("\n" * block.line + block.text, str(page), "exec", dont_inherit=True)
        if "file" in block.marks:
            (tmp_path / block.marks["file"]).write_text(block.text, encoding="utf-8")
        elif "not run" not in block.marks:
            exec(block.marks.get("run first", ""), names)
            exec(code, names)
            exec(block.marks.get("run after", ""), names)


def commands(page: Path) -> Iterator[tuple[int, list[str]]]:
    """Every call of ``ftopt`` in the blocks of a page, from its verb on, and the block's line."""
    for block in blocks(page):
        if block.kind not in ("", "sh"):
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            if not re.match(r"(\w+=\S+ |\w*\$ +|pip install .*&& )*ftopt ", line.strip()):
                continue
            words = shlex.split(line.strip(), comments=True)
            words = words[words.index("ftopt") + 1 :]
            yield block.line, words[: words.index("&")] if "&" in words else words


@every_page
def test_the_commands_of_a_page_have_verbs_options_and_settings_that_exist(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for block in programs(page):
        if "file" in block.marks:
            (tmp_path / block.marks["file"]).write_text(block.text, encoding="utf-8")
    for line, words in commands(page):
        if not words[0].islower() or words[0].startswith("-"):
            continue  # `ftopt VERB`, `ftopt --help`
        assert words[0] in VERBS, f"{named(page)}:{line}: ftopt {words[0]}"
        parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
        importlib.import_module(f"ftopt.cli.{words[0]}").add(parser)
        takes_rest = any(action.nargs == argparse.REMAINDER for action in parser._actions)
        parse = parser.parse_known_args if takes_rest else parser.parse_known_intermixed_args
        given, rest = parse([word for word in words[1:] if not word.startswith("[")])
        assert not rest, f"{named(page)}:{line}: {rest}"
        if getattr(given, "recipe", None) in shipped():
            load(given.recipe, given.overrides)


@every_page
def test_the_commands_that_a_text_mentions_have_verbs_and_options_that_exist(page: Path) -> None:
    for command in re.findall(r"`ftopt ([a-z][^`]*)`", prose(page) if page.name != "CHANGELOG.md" else ""):
        verb, *words = command.split()
        assert verb in VERBS, f"{named(page)}: ftopt {command}"
        parser = argparse.ArgumentParser()
        importlib.import_module(f"ftopt.cli.{verb}").add(parser)
        options = {word.partition("=")[0].strip("[]") for word in words if word.lstrip("[").startswith("--")}
        assert options <= set(parser._option_string_actions), f"{named(page)}: ftopt {command}"


@every_page
def test_sections_of_recipes_on_a_page_are_valid(page: Path) -> None:
    for block in blocks(page):
        if block.kind == "yaml" and re.match(r"(method|policy|faults|data|train):\s", block.text):
            given = yaml.safe_load(block.text)
            if "sign_momentum" not in block.text:  # a file of the page, and of the test above
                found = examined({"name": "a", "replicas": 3, "method": {"name": "diloco"}} | given)
                assert found.errors == [], f"{named(page)}:{block.line}"


@every_page
def test_every_link_of_a_page_leads_to_a_page_or_a_heading(page: Path) -> None:
    for link in links(page):
        if re.match(r"https?://|mailto:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() and named(target) in COMING:
            continue
        assert target.is_file(), f"{named(page)}: {link}"
        assert not anchor or anchor in anchors(target), f"{named(page)}: {link}"


@every_page
def test_tabs_are_blocks_with_a_line_in_bold_above_each(page: Path) -> None:
    for each in re.findall(r"^<!-- tabs -->\n(.*?)(?:<!-- end tabs -->|\Z)", page.read_text("utf-8"), re.DOTALL | re.M):
        assert re.fullmatch(r"(\*\*[^*\n]+\*\*\n\n```\w+\n.*?\n```\n\n?){2,}", each, re.DOTALL), named(page)


def test_the_site_shows_every_page_once() -> None:
    nav = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    listed = [f"docs/{page}" for page in re.findall(r"([\w/.]+\.md)\n", nav) if not page.startswith("api/")]
    assert len(listed) == len(set(listed))
    assert set(listed) - COMING == {named(page) for page in PAGES if page.parent != ROOT} - COMING


def test_the_api_reference_shows_every_public_name() -> None:
    written = runpy.run_path(str(ROOT / "docs" / "api" / "generate.py"))["pages"]()
    found = {page.name: page.read_text("utf-8") for page in (ROOT / "docs" / "api").glob("*.md")}
    assert found == written, "run: python docs/api/generate.py"


def test_the_page_on_trainers_leads_to_every_example_once() -> None:
    shown = re.findall(r"\(\.\./examples/(\w+\.py)\)", (ROOT / "docs" / "trainers.md").read_text("utf-8"))
    assert sorted(shown) == sorted(path.name for path in (ROOT / "examples").glob("*.py"))


def test_the_first_page_and_the_readme_lead_to_every_page() -> None:
    pages = {page.name for page in PAGES if page.parent != ROOT} - {"index.md"}
    assert pages - set(links(ROOT / "docs" / "index.md")) == set()


@cache
def strings() -> list[str]:
    """All texts of ftopt's code, with a NUL for what is filled in; also those of each function, one after the other."""
    found = []
    for path in (ROOT / "ftopt").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                texts = [text for each in ast.walk(node) if (text := literal(each)) is not None]
                found += [*texts, "".join(texts)]
            elif (text := literal(node)) is not None:
                found.append(text)
    return found


def literal(node: ast.AST) -> str | None:
    """The text of a string or an f-string, None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[-\d.]*[a-z]|\{(!r)?\}", "\0", node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
    return None


@every_page
def test_every_message_that_a_page_quotes_is_one_of_the_code(page: Path) -> None:
    unknown = []
    for quoted in quotations(page):
        parts = [re.escape(part.strip()) for part in quoted.split("...") if part.strip()]
        pattern = re.compile(".*".join(parts), re.DOTALL)
        if not any(pattern.search(text) for text in strings()):
            unknown.append(quoted)
    assert unknown == [], named(page)


def test_the_page_on_versions_and_the_change_log_name_the_formats_of_the_code() -> None:
    page = (ROOT / "docs" / "operations.md").read_text("utf-8")
    log = (ROOT / "CHANGELOG.md").read_text("utf-8").replace("\n", " ")
    journal = json.loads(_HEADING).removeprefix("ftopt journal ")
    assert f"| protocol of coordinator and replicas | {PROTOCOL} |" in page
    assert f"| checkpoints | format {FORMAT} in" in page and f"| the journal | format {journal}, in" in page
    assert f"Protocol {PROTOCOL}, checkpoints of format {FORMAT}, journals of format {journal}." in log
    tested = re.findall(r'python: "([\d.]+)", torch', (ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))
    assert tested and all(f"| {python} |" in page for python in tested)


def test_loops_that_are_shown_check_the_job_s_end_before_they_step() -> None:
    """After the step, a replica that comes back to a finished job would make a version more."""
    sources = [*PAGES, *(ROOT / "examples").glob("*.py"), *(ROOT / "ftopt").rglob("*.py")]
    found = []
    for path in sources:
        lines = path.read_text("utf-8").splitlines()
        for number, (before, line, behind) in enumerate(zip(lines, lines[1:], lines[2:], strict=False), 2):
            if re.search(r"if .*\binner_step >= ", line) and behind.strip() == "break":
                found.append((f"{path}:{number}", bool(re.match(r"\s*(for|while) .*:$", before))))
    assert found and not [place for place, checks_before in found if not checks_before]


def test_names_that_a_docstring_describes_together_have_an_entry_each_in_the_reference() -> None:
    pytest.importorskip("griffe")
    split = runpy.run_path(str(ROOT / "docs" / "api" / "split_names.py"))["split"]
    text = "One, two: three.\n\nArgs:\n    a, b: text\n        goes on.\n    c: text."
    assert split(text) == (
        "One, two: three.\n\nArgs:\n    a: text\n        goes on.\n    b: text\n        goes on.\n    c: text."
    )
