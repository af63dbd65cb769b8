"""How the site is built: `make docs`. Notebooks are stored executed, and tested as such: the build runs nothing."""

import inspect
import re
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import reference  # noqa: E402 - beside this file

from murano import __version__  # noqa: E402

project = "Murano"
author = "The Murano authors"
copyright = author
version = release = __version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "**/.ipynb_checkpoints"]

nb_execution_mode = "off"
nb_merge_streams = True
myst_heading_anchors = 3
myst_enable_extensions = ["deflist"]

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_inherit_docstrings = False  # what a method that overrides another does is said there
autodoc_preserve_defaults = True
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_use_rtype = False
python_use_unqualified_type_names = True
python_display_short_literal_types = True
python_maximum_signature_line_length = 100

html_theme = "furo"
html_title = "Murano"
html_static_path = ["_static"]
html_css_files = ["murano.css"]
html_copy_source = False
html_show_sphinx = False

# Notebooks live at the root, where a reader of the repository looks for them; the site has copies.
shutil.rmtree(HERE / "notebooks", ignore_errors=True)
shutil.copytree(HERE.parent / "notebooks", HERE / "notebooks", ignore=shutil.ignore_patterns(".*", "murano_outputs"))
reference.write(HERE / "reference")
EXPORTED = reference.exported()


class Plain(str):
    """A text that stands in a signature without quotes."""

    __slots__ = ()

    def __repr__(self):
        return str(self)


def setup(app):
    """Connect what is below; each says what it does."""
    app.connect("source-read", drop_missing)
    app.connect("source-read", link_notebooks)
    app.connect("autodoc-process-signature", as_written)
    app.connect("autodoc-process-docstring", whole_sentences, priority=600)  # after napoleon
    app.connect("missing-reference", as_exported)


def drop_missing(app, docname, source):
    """Drop entries of the index's tables of contents that have no page."""
    if docname == "index":
        entry = re.compile(r"^([\w/]+)\n", re.MULTILINE)
        source[0] = entry.sub(lambda line: line[0] if line[1] in app.env.found_docs else "", source[0])


def link_notebooks(app, docname, source):
    """Pages link to the notebooks where they lie in the repository; on the site that is to their copies."""
    source[0] = source[0].replace("](../notebooks/", "](notebooks/").replace("](../../notebooks/", "](../notebooks/")


def as_written(app, what, name, value, options, given, returns):
    """A signature with the source's own annotations: shapes as jaxtyping has them, no module paths."""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return None

    def plain(part):
        return Plain(part) if isinstance(part, str) else Plain("...") if repr(part) == "<factory>" else part

    parameters = [
        p.replace(annotation=plain(p.annotation), default=p.default if isinstance(p.default, str) else plain(p.default))
        for p in found.parameters.values()
        if p.name not in ("self", "cls")
    ]
    text = str(found.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
    result = found.return_annotation if isinstance(found.return_annotation, str) else None
    return text, None if what == "class" else result


def as_exported(app, env, node, content):
    """``murano.lens.logit_lens`` in a docstring leads to ``murano.logit_lens``, as which it is documented."""
    target = EXPORTED.get(node.get("reftarget"))
    if target is None or node.get("refdomain") != "py":
        return None
    python = env.get_domain("py")
    return python.resolve_xref(env, node["refdoc"], app.builder, node["reftype"], target, node, content)


def whole_sentences(app, what, name, value, options, lines):
    """Napoleon takes what stands before a colon in a property's docstring for its type: put the sentence together again."""
    if what == "property" and any(line.startswith(":type:") for line in lines):
        lines[:] = inspect.getdoc(value).splitlines()
