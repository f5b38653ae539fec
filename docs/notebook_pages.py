"""Hooks of MkDocs: each notebook is a page, with the outputs that are kept in it; and how long lists are shown."""

from __future__ import annotations

import base64
import json
import posixpath
import re
from typing import Any

from mkdocs.structure.files import File, Files

FOLDER = "notebooks/"
META: dict[str, dict[str, Any]] = {
    "operators.md": {"hide": ["toc"], "search": {"boost": 0.1}},
    "changelog.md": {"search": {"boost": 0.1}},
    "scaling.md": {"hide": ["toc"]},
}
"""Front matter of pages that have none of their own: room for wide tables, and guides before lists in the search."""


def on_files(files: Files, *, config: Any) -> Files:
    """What MkDocs calls with all files of the site."""
    for notebook in [f for f in files if f.src_uri.startswith(FOLDER) and f.src_uri.endswith(".ipynb")]:
        stem = notebook.src_uri.removesuffix(".ipynb")
        page, pictures = as_markdown(json.loads(notebook.content_string), posixpath.basename(stem))
        files.append(File.generated(config, f"{stem}.md", content=page))
        for name, picture in pictures.items():
            files.append(File.generated(config, FOLDER + name, content=picture))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Links to notebooks lead to their pages."""
    page.meta.update(META.get(page.file.src_uri, {}))
    markdown = re.sub(r"(\]\([\w/]+)\.ipynb\)", r"\1.md)", markdown)
    if not page.file.src_uri.startswith(FOLDER):
        return markdown
    page.meta["hide"] = ["toc"]  # code and outputs are up to 120 columns wide
    return markdown.replace("../CONTRIBUTING.md", "../contributing.md")


def as_markdown(notebook: Any, name: str) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and its pictures by file name.

    >>> code = {"cell_type": "code", "source": ["print(1)"], "outputs": [{"name": "stdout", "text": ["1"]}]}
    >>> print(as_markdown({"cells": [code]}, "one")[0])
    ```python
    print(1)
    ```
    <BLANKLINE>
    ```{.text .output}
    1
    ```
    <BLANKLINE>
    *This page is the notebook [one.ipynb](<one.ipynb>).*
    """
    parts, pictures = [], {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(f"```python\n{source}\n```" if cell["cell_type"] == "code" else source)
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                file = f"pictures/{name}_{len(pictures)}.png"
                pictures[file] = base64.b64decode(data["image/png"])
                parts.append(f"![what the code above draws]({file})")
            elif "text" in output:
                parts.append(f"```{{.text .output}}\n{''.join(output['text']).rstrip()}\n```")
            else:
                raise ValueError(f"{name}.ipynb has an output of {sorted(data)}, which pages do not show")
    parts.append(f"*This page is the notebook [{name}.ipynb](<{name}.ipynb>).*")
    return "\n\n".join(parts), pictures
