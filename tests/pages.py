"""The code blocks of the pages, so that tests run what is written there."""

import re
from pathlib import Path

from tests.running import ROOT


def blocks(page: str, language: str = "python") -> list[str]:
    """Return the code blocks of one language, in order."""
    text = (ROOT / page).read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def module_of(page: str, name: str, folder: Path) -> Path:
    """Write the block whose docstring begins with `name.py:` to that file. Returns the file."""
    (block,) = (block for block in blocks(page) if block.startswith(f'"""{name}.py:'))
    file = folder / f"{name}.py"
    file.write_text(block)
    return file
