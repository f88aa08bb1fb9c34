"""mkdocs hooks: files of the repository that a page links to become pages of the site.

On a code host `../lockstep/worker/program.py` is a file next to docs/. A site contains docs/
only, so the file is shown at source/lockstep/worker/program.py.html: Markdown as it is, all else
as code.
"""

import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(\]\()([^)#\s:]+)")
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n"


def origin(src_uri: str) -> str:
    """Return the file of the repository that a page of the site shows."""
    shown = src_uri.removeprefix("source/")
    return f"docs/{src_uri}" if shown == src_uri else shown


def linked(src_uri: str, target: str) -> str | None:
    """Return the path of a link's target if it is a file of the repository outside of docs/."""
    path = normpath(join(dirname(origin(src_uri)), target))
    outside = not path.startswith(("docs/", "..")) and (ROOT / path).is_file()
    return path if outside else None


def site_path(path: str) -> str:
    """Return the path of a file of the repository in the site."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}" if path.endswith(".md") else f"source/{path}.md"


def content(path: str) -> str:
    """Return the Markdown of a file's page."""
    text = (ROOT / path).read_text()
    if path.endswith(".md"):
        return text
    language = {"py": "python", "toml": "toml", "json": "json"}.get(path.rsplit(".", 1)[-1], "text")
    return f"{UNSEARCHED}# {path}\n\n~~~~~~{language}\n{text}\n~~~~~~\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for every file that a page links to, and for those that these link to."""
    waiting = [(page.src_uri, page.content_string) for page in files.documentation_pages()]
    done = set()
    while waiting:
        src_uri, text = waiting.pop()
        if src_uri.endswith(".py.md"):
            continue
        for _, target in LINK.findall(text):
            path = linked(src_uri, target)
            if path is None or path in done:
                continue
            done.add(path)
            files.append(File.generated(config, site_path(path), content=content(path)))
            waiting.append((site_path(path), content(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point the page's links at these pages."""
    here = page.file.src_uri

    def moved(match: re.Match[str]) -> str:
        path = normpath(join(dirname(origin(here)), match[2]))
        outside = linked(here, match[2]) is not None
        if not outside and origin(here).startswith("docs/"):
            return match[0]
        return match[1] + relpath(site_path(path), dirname(here) or ".")

    return markdown if here.endswith(".py.md") else LINK.sub(moved, markdown)
