"""What the pages show, for the type checker: `python -m tests.support.page_types`.

The Python blocks of the README and of each page in docs/ are one program a page, checked by mypy
as a user's. What else is checked comes from the cache of the project.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from mypy import api

REPOSITORY = Path(__file__).parents[2]


def write_programs(folder: Path) -> None:
    """Writes the program of each page that has Python blocks."""
    for page in (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))):
        blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S)
        name = re.sub(r"\W", "_", page.relative_to(REPOSITORY).with_suffix("").as_posix())
        if blocks and name != "docs_guides_elastic":  # torch's DataLoader takes more than it says
            (folder / f"{name}.py").write_text("\n".join(blocks))


def main() -> int:
    """Returns mypy's exit status after printing what it says."""
    with tempfile.TemporaryDirectory() as folder:
        # A package, so that the settings of the project for it hold.
        (pages := Path(folder, "pages")).mkdir()
        (pages / "__init__.py").touch()
        write_programs(pages)
        said, failed, status = api.run(["--no-error-summary", str(pages)])
        print(said, failed, sep="", end="")
        return status


if __name__ == "__main__":
    sys.exit(main())
