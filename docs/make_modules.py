"""Writes the table of all modules, `docs/design/modules.md`, from their docstrings.

python docs/make_modules.py
"""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "ray_dcp"
PAGE = Path(__file__).parent / "design" / "modules.md"
MIRROR = "For type checkers:"

HEAD = """# All modules

One line each, the first of its docstring. Written by `python docs/make_modules.py`; a test
compares. What imports what: `tests/unit/test_layers.py`. The order of a save and of a load:
`ray_dcp/DESIGN.md`.
"""


def first_line(path: Path) -> str:
    """Returns the first paragraph of a module's docstring, in one line of a table."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(text.partition("\n\n")[0].split()).replace("|", "\\|")


def page() -> str:
    """Returns the page as it has to be."""
    folders: dict[str, list[tuple[str, str]]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        line = first_line(path)
        if not line.startswith(MIRROR):
            folder = path.parent.relative_to(PACKAGE.parent).as_posix()
            folders.setdefault(folder, []).append((path.stem, line))
    parts = [HEAD]
    for folder, modules in sorted(folders.items()):
        title = next((line for stem, line in modules if stem == "__init__"), "")
        rows = [f"| `{stem}` | {line} |" for stem, line in modules if stem != "__init__"]
        table = ["| module | |", "|---|---|", *rows] if rows else []
        parts.append("\n".join([f"## {folder}/", "", title, "", *table]).rstrip() + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
