"""What the pages show, for the type checker: `python -m tests.support.page_types`.

The Python blocks of the README and of each page in docs/ are one program a page, checked by mypy
as a user's, without the options of this project.
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
        write_programs(Path(folder))
        options = ["--config-file=", "--check-untyped-defs", "--ignore-missing-imports"]
        # Why apart: the options of two runs would empty each other's cache.
        options += [
            "--no-error-summary",
            "--cache-dir=.mypy_cache/pages",
            "--follow-imports=silent",
        ]
        said, failed, status = api.run([*options, folder])
        print(said, failed, sep="", end="")
        return status


if __name__ == "__main__":
    sys.exit(main())
