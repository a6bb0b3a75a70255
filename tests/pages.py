"""The code blocks of the pages, so that tests run what is written there.

A block that no test runs carries a comment above it, which readers don't see: `<!-- not run: needs a GPU -->`.
`python -m tests.pages` lists these blocks with their reasons.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from tests.running import ROOT

PAGES: Final = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"))
)
_BLOCK: Final = re.compile(r"^(?:<!-- not run: ([^\n]+) -->\n)?```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_END_OF_COMMAND: Final = {">", "2>", "|", "&", "&&"}


class Block(NamedTuple):
    """A block of a page. `not_run` says why no test runs it; `None` if one does."""

    page: str
    line: int
    language: str
    text: str
    not_run: str | None

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    def commands(self) -> Iterator[list[str]]:
        """The words of each whole `rolloutctl` command in it, without what follows for the shell."""
        for line in self.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True) if "rolloutctl " in line else []
            if words[:1] == ["rolloutctl"] and not {"…", "..."} & {*words}:
                end = next((index for index, word in enumerate(words) if word in _END_OF_COMMAND), None)
                yield words[1:end]


def blocks_of(page: str) -> Iterator[Block]:
    """All blocks of a page but Sphinx's directives, in order."""
    text = (ROOT / page).read_text("utf-8")
    for found in _BLOCK.finditer(text):
        not_run, language, body = found.groups()
        if not language.startswith("{"):
            yield Block(page, text.count("\n", 0, found.start(3)), language, body, not_run)


def blocks(page: str, language: str = "python") -> list[str]:
    """The texts of a page's blocks in one language that are run, in order."""
    return [block.text for block in blocks_of(page) if block.language == language and block.not_run is None]


def module_of(page: str, name: str, folder: Path) -> Path:
    """Write the block whose docstring begins with `name.py:` to that file. Returns the file."""
    (block,) = (block for block in blocks(page) if block.startswith(f'"""{name}.py:'))
    file = folder / f"{name}.py"
    file.write_text(block)
    return file


if __name__ == "__main__":
    for page in PAGES:
        for block in blocks_of(page):
            if block.not_run:
                print(f"{block.place}: {block.not_run}")  # noqa: T201
