"""The code of a page of the documentation, as it stands there."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def code_of(page, number):
    """Return the Python block of this number, from 0 on."""
    return re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)[number]
