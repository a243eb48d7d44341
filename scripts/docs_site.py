"""What MkDocs has to be told: the order of pages, and where links out of ``docs/`` lead (a hook of ``mkdocs.yml``).

On the site, a file of the repository outside of ``docs/`` that a page links to has a copy below ``repository/``.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parent.parent
INDEX = "docs/README.md"
_LINK = re.compile(r"(?<=\]\()(?!\w+:)([^)\s#]+)")
_SECTION = re.compile(r"^## (.+)\n((?:(?!## ).*\n?)*)", re.MULTILINE)
_ELSEWHERE = "repository/"
_MOVED = {"README.md": "index.md", INDEX: "documentation.md"}
"""The README is the site's first page, in place of the index."""


def _on_site(path: str) -> str:
    return _MOVED.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else _ELSEWHERE + path)


def _in_repository(uri: str) -> str:
    for path, moved in _MOVED.items():
        if uri == moved:
            return path
    return uri.removeprefix(_ELSEWHERE) if uri.startswith(_ELSEWHERE) else f"docs/{uri}"


def _target(path: str, link: str) -> str:
    """Return the file that a link in a file means, both in the repository."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def on_config(config: Any) -> None:
    """Take the sections of the index, and the pages that its tables link to, as those of the site."""
    text = (ROOT / INDEX).read_text(encoding="utf-8")
    sections = [
        {title: [_on_site(_target(INDEX, link)) for link in dict.fromkeys(_LINK.findall(rows))]}
        for title, rows in _SECTION.findall(text)
    ]
    config.nav = [*(_on_site(path) for path in _MOVED), *sections]


def on_files(files: Files, config: Any) -> None:
    """Add the files outside of ``docs/`` that pages link to, and those that these link to in turn."""
    if (index := files.get_file_from_path(INDEX.removeprefix("docs/"))) is not None:
        files.remove(index)
    for path, uri in _MOVED.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    pages = [_in_repository(f.src_uri) for f in files.documentation_pages()]
    for page in pages:
        for link in _LINK.findall((ROOT / page).read_text(encoding="utf-8")):
            path = _target(page, link)
            if (ROOT / path).is_file() and files.get_file_from_path(_on_site(path)) is None:
                source, place = str(ROOT / path), InclusionLevel.NOT_IN_NAV
                files.append(File.generated(config, _on_site(path), abs_src_path=source, inclusion=place))
                pages += [path] if path.endswith(".md") else []


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links lead to where their files are on the site."""
    uri = page.file.src_uri

    def moved(link: re.Match[str]) -> str:
        return posixpath.relpath(_on_site(_target(_in_repository(uri), link[1])), posixpath.dirname(uri) or ".")

    return _LINK.sub(moved, markdown)
