"""`make docs`: these pages and the reference of the Python package, by Sphinx, in build/docs."""

project = "muster"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = "muster"
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_docstring_signature = True
suppress_warnings = ["myst.xref_missing", "misc.highlighting_failure"]
exclude_patterns = []
