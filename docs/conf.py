"""Sphinx: `make docs`."""

import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from hvd_sparse import __version__

project = "hvd_sparse"
author = "the hvd_sparse contributors"
copyright = f"2026, {author}"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_heading_anchors = 3
default_role = "code"  # `name` in docstrings
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures have them
autodoc_mock_imports = ["lightning", "transformers"]  # whose callbacks some classes extend
napoleon_google_docstring = True
exclude_patterns = ["_build"]

html_theme = "pydata_sphinx_theme"
html_title = f"hvd_sparse {__version__}"
html_theme_options = {"show_toc_level": 2, "navigation_with_keys": True, "show_prev_next": True}
html_sidebars = {"index": []}
html_show_sourcelink = False
