"""What MkDocs asks while it builds the site: files outside docs/ that pages link to come along, and every page is there as Markdown,
too.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"(\]\()((?:\.\./)+[^)\s#]+)((?:#[^)\s]*)?\))")
OUTSIDE = "files"
"""Folder of the site for files from outside docs/."""


def outside(page: str, link: str) -> Path | None:
    """File of the checkout that a page's link leads to; None for one within docs/."""
    target = (DOCS / posixpath.dirname(page) / link).resolve()
    return target if target.is_file() and not target.is_relative_to(DOCS) else None


def on_files(files: Files, config: Any) -> Files:
    """Add the files that pages link to outside docs/, as text that a browser shows."""
    linked = {
        target
        for page in files.documentation_pages()
        for _, link, _ in LINK.findall(Path(page.abs_src_path or "").read_text())
        if (target := outside(page.src_uri, link)) is not None
    }
    for target in sorted(linked):
        files.append(File.generated(config, f"{OUTSIDE}/{shown_as(target)}", abs_src_path=str(target)))
    return files


def shown_as(target: Path) -> str:
    return f"{target.relative_to(ROOT).as_posix()}.txt"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return with_links_inside(markdown, page.file.src_uri)


def with_links_inside(markdown: str, page: str) -> str:
    """Lead links that leave docs/ to the copies in the site."""

    def moved(found: re.Match[str]) -> str:
        target = outside(page, found[2])
        if target is None:
            return found[0]
        return f"{found[1]}{posixpath.relpath(f'{OUTSIDE}/{shown_as(target)}', posixpath.dirname(page) or '.')})"

    return LINK.sub(moved, markdown)


def on_post_build(config: Any) -> None:
    """Write each page as Markdown beside its HTML, and llms.txt, which lists them with their titles (llmstxt.org)."""
    site = Path(config["site_dir"])
    lines = ["# Lockstep", "", f"> {config['site_description']}", ""]
    for section in config["nav"]:
        ((title, pages),) = section.items()
        lines += [f"## {title}", ""]
        for name in _flat(pages):
            text = (DOCS / name).read_text()
            (site / name).write_text(with_links_inside(text, name))
            heading, about = text.split("\n", 2)[0], _first_paragraph(text)
            lines.append(f"- [{heading.removeprefix('# ')}]({name}): {about}")
        lines.append("")
    (site / "llms.txt").write_text("\n".join(lines))


def _flat(pages: list[Any]) -> Iterator[str]:
    """Pages of a section and of its groups."""
    for page in pages:
        if isinstance(page, str):
            yield page
        else:
            for group in page.values():
                yield from _flat(group)


def _first_paragraph(text: str) -> str:
    """First sentence below the heading, without links and marks."""
    paragraph = next((part for part in text.split("\n\n")[1:] if re.match(r"[A-Za-z`*\[]", part)), "")
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
    return re.split(r"(?<=[.:])\s", plain)[0]
