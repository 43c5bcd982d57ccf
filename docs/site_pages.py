"""The notebooks, with the outputs that they are kept with, and the examples as pages of the site.

A hook of mkdocs. Nothing is written into ``docs/``: the pages exist while the site is built.
"""

from __future__ import annotations

import ast
import base64
import json
import re
import textwrap
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

NOTEBOOKS = sorted((Path(__file__).parent / "notebooks").glob("*.ipynb"))
EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


def notebook(path: Path, config: MkDocsConfig) -> list[File]:
    """The page of a notebook, and its pictures."""
    parts: list[str] = []
    pictures: list[File] = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            if "text" in output:
                parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
            elif png := output.get("data", {}).get("image/png"):
                name = f"{path.stem}-{len(pictures)}.png"
                content = base64.b64decode("".join(png))
                pictures.append(File.generated(config, f"notebooks/{name}", content=content))
                parts.append(f"![{path.stem.replace('_', ' ')}]({name})")
    return [File.generated(config, f"notebooks/{path.stem}.md", content="\n\n".join(parts)), *pictures]


def example(path: Path, config: MkDocsConfig) -> File:
    """The page of an example: its docstring, then the rest of its text."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    about = (ast.get_docstring(tree) or "").replace("::\n", ":\n")
    rest = "\n".join(source.splitlines()[tree.body[0].end_lineno :]).strip()
    text = f"# {path.name}\n\n{about}\n\n````python\n{rest}\n````\n"
    return File.generated(config, f"examples/{path.stem}.md", content=text)


def on_config(config: MkDocsConfig) -> None:
    """Puts the pages at the end of the first section."""
    nav: list[dict[str, Any]] = config.nav or []
    nav[1]["Start"] += [f"notebooks/{path.stem}.md" for path in NOTEBOOKS]
    nav[1]["Start"].append({"Examples": [f"examples/{path.stem}.md" for path in EXAMPLES]})


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages."""
    for path in NOTEBOOKS:
        for file in notebook(path, config):
            files.append(file)
    for path in EXAMPLES:
        files.append(example(path, config))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """A link to a notebook or an example leads to its page. Blocks between ``<!-- tabs -->`` and ``<!-- end tabs -->``
    are tabs; a line in bold above each is its name."""
    markdown = re.sub(r"(\]\((?:notebooks/)?\w+)\.ipynb\)", r"\1.md)", markdown)
    markdown = re.sub(r"\]\(\.\./(examples/\w+)\.py\)", r"](\1.md)", markdown)
    return re.sub(r"<!-- tabs -->\n(.*?)<!-- end tabs -->", _tabs, markdown, flags=re.DOTALL)


def _tabs(found: re.Match[str]) -> str:
    """The blocks below lines in bold as tabs."""
    return re.sub(r"^    \*\*(.+)\*\*$", r'=== "\1"', textwrap.indent(found[1], "    "), flags=re.MULTILINE)
