"""What the site adds to MkDocs.

Result files and examples as pages, tables taken from them, formulas as MathML.
"""

import json
import posixpath
import re
from pathlib import Path
from typing import Any

import latex2mathml.converter
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
# What lies outside docs/ and is on the site as well, under the same path. Links such as
# ../results/... lead to it.
PAGES = ("results/*/*.md", "benchmarks/*.md", "CHANGELOG.md", "CONTRIBUTING.md")
PICTURES = ("results/*/*.png", "benchmarks/*.png")
NOTEBOOKS = "docs/*.ipynb"
WIDE = 110  # letters: in a wider table, pairs of numbers stand one above the other
EXAMPLES = ("examples/*.py", "examples/gallery/*.py")

TABLE = re.compile(r"(?:^\|.*\n?)+", re.MULTILINE)
# A link to a file's table: which of its tables, what its rows must have, and the file.
TABLE_LINK = re.compile(
    r"^\[Table(?: (\d+))?(?:, rows of (.+?))?\]\(((?:results|benchmarks)/\S+?)\)$",
    re.MULTILINE,
)
LINK = re.compile(r"\]\((\.\./[^)#\s]+|\w+\.ipynb)")
FROM_NETWORK = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"(?:https?:)?//|<link\b(?![^>]*canonical)[^>]*\bhref=\"(?:https?:)?//"
)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.mdx_configs.setdefault("pymdownx.superfences", {})["custom_fences"] = [
        {"name": "math", "class": "math", "format": mathml}
    ]
    return config


def mathml(source: str, *_: Any, **__: Any) -> str:
    formula = latex2mathml.converter.convert(source.strip(), display="block")
    return f'<div class="math">{formula}</div>'


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for pattern in (*PAGES, *PICTURES):
        for path in sorted(ROOT.glob(pattern)):
            uri = path.relative_to(ROOT).as_posix()
            files.append(
                File(uri, str(ROOT), config.site_dir, config.use_directory_urls)
            )
    for path in sorted(path for pattern in EXAMPLES for path in ROOT.glob(pattern)):
        name = path.relative_to(ROOT).as_posix()
        page = f"# {name}\n\n```python\n{path.read_text(encoding='utf-8')}```\n"
        files.append(File.generated(config, name.replace(".py", ".md"), content=page))
    for path in sorted(ROOT.glob(NOTEBOOKS)):
        page = notebook_page(path)
        files.append(File.generated(config, f"{path.stem}.md", content=page))
    files.append(File.generated(config, "results/all.md", content=all_results()))
    return files


def notebook_page(path: Path) -> str:
    """A notebook as Markdown: text, code, and what the code printed and drew."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] != "code":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            if "text" in output:
                parts.append(f"```text\n{''.join(output['text'])}```")
            else:
                png = output["data"]["image/png"].strip()
                parts.append(f'<img alt="" src="data:image/png;base64,{png}">')
    parts.append(f"This page is [a notebook]({path.name}), as it was run.")
    return "\n\n".join(parts) + "\n"


def all_results() -> str:
    """A page with a link to each file of results, under its own title."""
    lines = [
        "# All results",
        "",
        "Every number on this site is in one of these files, and a command makes it.",
    ]
    for folder in ("results", "benchmarks"):
        lines += ["", f"## {folder}", ""]
        for path in sorted(path for pattern in PAGES for path in ROOT.glob(pattern)):
            uri = path.relative_to(ROOT).as_posix()
            if uri.startswith(folder):
                title = re.search(
                    r"^# (.*)", path.read_text(encoding="utf-8"), re.MULTILINE
                )
                link = posixpath.relpath(uri, "results")
                lines.append(
                    f"- [`{uri}`]({link})" + (f": {title[1]}" if title else "")
                )
    return "\n".join(lines) + "\n"


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files
) -> str:
    here = posixpath.dirname(page.file.src_uri)

    def on_site(link: re.Match[str]) -> str:
        """From docs/ it is ../results/x.md, on the site results/x.md."""
        if "/" not in link[1]:  # a notebook, which is a page here
            page_of = link[1].replace(".ipynb", ".md")
            return link[0] if page_of == page.file.src_uri else f"]({page_of}"
        target = posixpath.normpath(posixpath.join("docs", here, link[1]))
        if target.startswith("docs/"):
            return link[0]
        if target.startswith("examples/"):
            target = target.replace(".py", ".md")
        return f"]({posixpath.relpath(target, here or '.')}"

    def table(link: re.Match[str]) -> str:
        number, path = int(link[1] or 1), link[3]
        tables = (
            TABLE.findall((ROOT / path).read_text(encoding="utf-8"))
            if (ROOT / path).is_file()
            else []
        )
        if len(tables) < number:
            raise PluginError(
                f"{page.file.src_uri}: {path} has {len(tables)} tables, not {number}"
            )
        head, rule, *lines = tables[number - 1].splitlines()
        wanted = link[2].split(" and ") if link[2] else []
        kept = [line for line in lines if all(f"| {text} |" in line for text in wanted)]
        if not kept:
            raise PluginError(
                f"{page.file.src_uri}: no line of {path} has {' and '.join(wanted)}"
            )
        source = f"[{path}]({posixpath.relpath(path, here or '.')}){{ .source }}"
        shown = "\n".join([head, rule, *kept])
        if max(map(len, shown.splitlines())) > WIDE:
            shown = shown.replace(" / ", " /<br>")
        return f"{shown}\n\n{source}"

    if page.file.src_uri.startswith(("results/", "benchmarks/")):
        return markdown
    return TABLE_LINK.sub(table, LINK.sub(on_site, markdown))


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    if found := FROM_NETWORK.search(output):
        raise PluginError(
            f"{page.file.src_uri} loads something from the network: {found[0]}"
        )
    return output
