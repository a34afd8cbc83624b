"""Extracts the code blocks of the documentation."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.glob("*.md")])
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def fenced(page, language):
    """Return the blocks of a language ("" for none) in a page."""
    return [code for found, code in FENCED.findall(page.read_text()) if found == language]


def code_of(page, number):
    """Return the Python block with this number, starting at 0, in a page of docs."""
    return fenced(DOCS / page, "python")[number]


def scripts():
    """Return {"page:number": code} of all Python blocks, except those that a tutorial writes to files."""
    return {
        f"{page.name}:{number}": code
        for page in PAGES
        if page.name != "adding-a-method.md"  # test_adding_a_method.py runs these
        for number, code in enumerate(fenced(page, "python"))
    }


def kind(code):
    """Return what a script needs: "pipeline" (ranks as stages), "ddp", "torch", "tensorflow" (Horovod), or "alone"."""
    if "Pipeline(" in code:
        return "pipeline"
    if "hvd_sparse.torch.ddp" in code:
        return "ddp"
    return next((framework for framework in ("torch", "tensorflow") if f"import horovod.{framework}" in code), "alone")


def scripts_of(wanted):
    """Return the scripts of a kind."""
    return {name: code for name, code in scripts().items() if kind(code) == wanted}
