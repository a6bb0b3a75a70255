"""The documentation site: pages in Markdown, an API reference from docstrings. `make docs` builds it, offline."""

from importlib.metadata import version as installed_version

project = "rolloutctl"
version = release = installed_version("rolloutctl")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"rolloutctl {version}"
html_copy_source = False

myst_heading_anchors = 3

default_role = "code"  # docstrings write `name`, as Markdown does
autoclass_content = "class"
autodoc_class_signature = "separated"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_maximum_signature_line_length = 100
napoleon_numpy_docstring = False
napoleon_use_ivar = True
add_module_names = False
