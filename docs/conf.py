"""The site: `make docs` builds it into docs/_build, with warnings as errors."""

import re
import sys
from pathlib import Path

from docutils import nodes

import narrowcast

project = "Narrowcast"
author = "the Narrowcast authors"
copyright = author
version = release = narrowcast.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
templates_path = []

# -- pages ---------------------------------------------------------------------------------------------------------
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3  # links to headings as GitHub makes them
suppress_warnings = ["myst.header"]
nb_execution_mode = "force"  # the tour's outputs are those of this version
nb_execution_raise_on_error = True
nb_execution_in_temp = True
nb_execution_timeout = 600
nb_merge_streams = True
highlight_language = "none"
copybutton_prompt_text = "$ "
copybutton_exclude = ".linenos, .gp, .go"

# -- the API, from docstrings --------------------------------------------------------------------------------------
default_role = "code"  # docstrings write `name`
autosummary_generate = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
# Private types, and those of packages that ELSEWHERE does not know: no page is about them.
nitpick_ignore_regex = [("py:.*", r"(?!narrowcast\.[a-z]+$).*")]

# Where the types of signatures are described. The names are those that a type calls itself; intersphinx would ask the
# network for the same at each build.
TORCH, PYTHON = "https://docs.pytorch.org/docs/stable/", "https://docs.python.org/3/library/"
ELSEWHERE = {
    "torch.Tensor": TORCH + "tensors.html#torch.Tensor",
    "torch.device": TORCH + "tensor_attributes.html#torch.device",
    "torch.dtype": TORCH + "tensor_attributes.html#torch.dtype",
    "torch.export.exported_program.ExportedProgram": TORCH + "export/api_reference.html#torch.export.ExportedProgram",
    "torch.jit._script.ScriptModule": TORCH + "generated/torch.jit.ScriptModule.html",
    "torch.nn.modules.module.Module": TORCH + "generated/torch.nn.Module.html",
    "torch.optim.optimizer.Optimizer": TORCH + "optim.html#torch.optim.Optimizer",
    "os.PathLike": PYTHON + "os.html#os.PathLike",
    "pathlib.Path": PYTHON + "pathlib.html#pathlib.Path",
} | {
    f"collections.abc.{name}": PYTHON + f"collections.abc.html#collections.abc.{name}"
    for name in ("Callable", "Iterable", "Iterator", "Mapping", "Sequence")
}

# -- how it looks --------------------------------------------------------------------------------------------------
html_theme = "furo"
html_title = "Narrowcast"
html_static_path = ["_static"]
html_css_files = ["narrowcast.css"]
html_copy_source = False
html_show_sphinx = False
pygments_style = "friendly"
pygments_dark_style = "native"


# -- docstrings ----------------------------------------------------------------------------------------------------
# The house writes arguments as `name: what it is`, with what follows indented; Sphinx wants definition lists.
ITEM = re.compile(r"^([a-z_*][\w*, ]*):\s+(?=\S)")


def write_definition_lists(app, what, name, obj, options, lines):
    """Paragraphs that begin with `name: ...` become lists of definitions."""
    made = []
    inside = False
    for i, line in enumerate(lines):
        begins = i == 0 or not lines[i - 1].strip()
        item = ITEM.match(line)
        if begins:
            inside = bool(item)
        if not line.strip() or not inside:
            made.append(line)
        elif item:
            made += ["", ", ".join(f"``{part.strip()}``" for part in item[1].split(",")), "    " + line[item.end() :]]
        else:
            made.append("    " + line.strip())
    lines[:] = made


def leave_decisions_out_of_the_search(app, env):
    """Who searches for a word looks for what to do, and not for why it became so."""
    for name in env.found_docs:
        if name.startswith("decisions/"):
            env.metadata[name]["nosearch"] = True


def link_types_of_others(app, env, node, contnode):
    """A type of torch's, or of Python's, leads to the page that describes it."""
    address = ELSEWHERE.get(node.get("reftarget"))
    return nodes.reference("", "", contnode, refuri=address, internal=False) if address else None


PICTURE = re.compile(r"pictures/page-(\w+)\.png$")


def link_pictures_to_their_pages(app, doctree):
    """A picture of a result's page leads to that page, which `write_example_pages` makes."""
    for image in list(doctree.findall(nodes.image)):
        name = PICTURE.search(image["uri"])
        if name:
            up = "../" * app.env.docname.count("/")
            link = nodes.reference("", "", refuri=f"{up}pages/{name[1]}.html", internal=False)
            image.replace_self(link)
            link += image


def write_example_pages(app, error):
    """The pages of the pictures, from the models and the code with which the pictures were taken."""
    if error is None and app.builder.name == "html":
        sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
        import page_pictures  # and with it the models

        (folder := Path(app.outdir) / "pages").mkdir(exist_ok=True)
        for name, html in page_pictures.pages().items():
            (folder / f"{name}.html").write_text(html, encoding="utf-8")


def setup(app):
    """Sphinx calls this."""
    app.connect("missing-reference", link_types_of_others)
    app.connect("doctree-read", link_pictures_to_their_pages)
    app.connect("build-finished", write_example_pages)
    app.connect("env-updated", leave_decisions_out_of_the_search)
    app.connect("autodoc-process-docstring", write_definition_lists)
