"""How the documentation is built: `make docs`."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from sphinx.pycode import ModuleAnalyzer

project = "telegrad"
author = "The telegrad authors"
version = release = importlib.metadata.version("telegrad")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "telegrad"
html_theme_options = {"footer_icons": []}
html_show_copyright = False

smartquotes = False  # they would change code, too
myst_heading_anchors = 3
default_role = "literal"  # docstrings write names as `name`

autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_use_type_comments = False
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False

nitpicky = True
# Names of other projects, and of our own that are no part of the public face, have no page here.
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|collections|typing|os|ssl|pathlib|threading|multiprocessing)\b.*"),
    (r"py:class", r"T|Callable|WorkerInfo|RemoteFuture"),  # in signatures that a page writes out
    (
        r"py:.*",
        r"telegrad\.(ids|wire|transport|(rpc|autograd|optim|observe|testing)\.\w+|nn\.module"
        r"|remote_calls\.T)\b.*",
    ),
]


def setup(app: Any) -> None:
    app.connect("autodoc-process-signature", _readable_signature)
    # The page writes out one signature for the overloads of `call` and `submit`.
    analyzer = ModuleAnalyzer.for_module("telegrad.remote_calls")
    analyzer.analyze()
    analyzer.overloads.clear()


def _readable_signature(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: Any
) -> tuple[str | None, Any]:
    """A default that a dataclass makes anew each time has no text that can be parsed."""
    return (signature.replace("<factory>", "...") if signature else signature), returns
