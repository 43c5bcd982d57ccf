"""The documentation as data: its pages, and their blocks, headings, links and quotations.

A comment in front of a block says what is special about it:

- ``<!-- not run: why -->``: it is compiled and no more.
- ``<!-- file: NAME -->``: the block is a file of the reader's folder.
- ``<!-- run first: ... -->``: code that the page does not show, for what the block takes for granted.
- ``<!-- run after: ... -->``: checks of what the block has done.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])

_MARK = re.compile(r"<!-- (not run|file|run first|run after):\s(.*?)\s*-->", re.DOTALL)
_PIECE = re.compile(
    r"(?P<mark><!-- .*?-->)|^(?P<indent> *)```(?P<kind>\w*)\n(?P<code>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE
)
_HEADING = re.compile(r"^(#+) (.+)$", re.MULTILINE)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and what a comment in front of it says."""

    kind: str
    text: str
    line: int
    marks: dict[str, str] = field(default_factory=dict)


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path) -> list[Block]:
    """A page's blocks in their order."""
    text, found, marks, end = text_of(page), [], dict[str, str](), 0
    for piece in _PIECE.finditer(text):
        if text[end : piece.start()].strip():
            marks = {}  # a comment is about the block right behind it
        end = piece.end()
        if piece["mark"]:
            marks |= dict(_MARK.findall(piece["mark"]))
            continue
        lines = piece["code"].splitlines(keepends=True)
        code = "".join(line.removeprefix(piece["indent"]) for line in lines)
        found.append(Block(piece["kind"], code, text.count("\n", 0, piece.start()) + 1, marks))
        marks = {}
    return found


def programs(page: Path) -> list[Block]:
    """A page's blocks of Python."""
    return [block for block in blocks(page) if block.kind == "python"]


def prose(page: Path) -> str:
    """A page without its blocks and comments."""
    return _PIECE.sub("", text_of(page))


def links(page: Path) -> list[str]:
    return _LINK.findall(re.sub(r"`[^`\n]*`", "", prose(page)))


def anchors(page: Path) -> set[str]:
    """What can be linked to: the anchor of a heading, if it is the same on GitHub and on the built site, and
    ``<a id="..."></a>``."""
    seen: dict[str, int] = {}
    found = set(re.findall(r'<a id="([\w-]+)"></a>', prose(page)))
    for _, heading in _HEADING.findall(prose(page)):
        plain = re.sub(r"[`*]|\]\([^)]*\)|\[", "", heading)
        github = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        site = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())
        again = seen[github] = seen.get(github, 0) + 1
        if github == site and again == 1:
            found.add(github)
    return found


def quotations(page: Path) -> list[str]:
    """Messages of ftopt that a page quotes, each a line ``> message``."""
    return re.findall(r"^> (.+)$", prose(page), re.MULTILINE)
