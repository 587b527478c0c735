"""Sphinx's settings. `build.py` copies this file next to the pages and runs Sphinx there."""

from __future__ import annotations

import re
from typing import Any

from docutils.nodes import SkipNode, reference
from docutils.nodes import literal as literal_node
from latex2mathml.converter import convert
from sphinx.util.nodes import make_refnode

import captum_vz

project = "captum_vz"
author = "captum_vz contributors"
version = release = captum_vz.__version__
project_copyright = author

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # the notebooks keep their outputs, and `.ci/run` executes them
nb_merge_streams = True
nb_render_markdown_format = "myst"  # the default, plain CommonMark, has no tables

default_role = "py:obj"  # `name` in a docstring is a link if the name is documented
autodoc_typehints = "none"  # the signature stays one line; the types are in the text
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
html_show_search_summary = False  # it needs a server: a page on disk may not read others
napoleon_use_ivar = True
napoleon_use_rtype = False

html_theme = "furo"
html_title = f"captum_vz {version}"
html_static_path = ["static"]
html_css_files = ["style.css"]
html_js_files = [("copy.js", {"defer": "defer"})]
html_extra_path = ["extra"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {"top_of_page_buttons": []}
html_math_renderer = "mathml"


def setup(app: Any) -> None:
    """Formulas become MathML, which browsers draw themselves: no script, and no request to another host."""
    app.add_html_math_renderer("mathml", inline_renderers=(_inline, None), block_renderers=(_block, None))
    app.connect("doctree-resolved", _link_names)


def _link_names(app: Any, document: Any, page: str) -> None:
    """Makes links of public names that stand as code in the text of a page."""
    domain = app.env.get_domain("py")
    kinds = ("class", "data", "exception", "function")
    names = {name.rpartition(".")[2]: (name, one) for name, one in domain.objects.items() if one.objtype in kinds}
    for literal in list(document.findall(literal_node)):
        name, found = names.get(literal.astext().removesuffix("()"), (None, None))
        if found is None or page.startswith("api/") or _is_in_link(literal):
            continue
        link = make_refnode(app.builder, page, found.docname, found.node_id, literal.deepcopy(), name)
        literal.replace_self(link)


def _is_in_link(node: Any) -> bool:
    return node is not None and (isinstance(node, reference) or _is_in_link(node.parent))


def _inline(translator: Any, node: Any) -> None:
    translator.body.append(_mathml(node.astext(), "inline"))
    raise SkipNode


def _block(translator: Any, node: Any) -> None:
    translator.body.append(f'<div class="math" tabindex="0">{_mathml(node.astext(), "block")}</div>')
    raise SkipNode


def _mathml(formula: str, display: str) -> str:
    # latex2mathml knows \big of a character, and not of the command \lVert.
    formula = re.sub(r"(\\[bB]ig)\\[lr]Vert", r"\1‖", " ".join(formula.split()))
    found = convert(formula, display=display)
    if "\\" in found:
        raise ValueError(f"latex2mathml does not know a command of {formula!r}: it wrote {found}.")
    return found
