"""MkDocs hooks: pages and images outside docs/, links, and admonitions.

Links in all pages are relative to the repository, so that they work on GitHub. Here they become
links of the site: a script has a page, a file of docs/ is at the top level, and a file without a
page becomes a link to the repository, or plain text if `repo_url` is empty. GitHub alerts, such as
`> [!NOTE]`, become admonitions.
"""

import ast
import os
import pathlib
import re

from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")
FOLDERS = ("guides/**/*.md", "guides/**/*.png", "benchmarks/*/*.md", "presets/*.md")
SCRIPTS = ("guides/*.py", "guides/recipes/*.py")
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
LINK_WITH_TEXT = re.compile(r"\[([^\]]*)\]\(missing:[^)]*\)")
FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
ALERT = re.compile(
    r"^> \[!(NOTE|TIP|IMPORTANT|WARNING|CAUTION)\][ \t]*\n((?:>.*\n?)+)", re.MULTILINE
)
ADMONITIONS = {
    "NOTE": "note",
    "TIP": "tip",
    "IMPORTANT": 'info "Important"',
    "WARNING": "warning",
    "CAUTION": 'danger "Caution"',
}


def find_scripts():
    return sorted(path for pattern in SCRIPTS for path in ROOT.glob(pattern))


def script_uri(script):
    """Returns the path of a script's page on the site."""
    return script.relative_to(ROOT).with_suffix(".md").as_posix()


def make_script_page(script):
    """Returns the Markdown of a script: its text, then its code.

    The text is the Markdown file of the same name, or else the docstring with the figure.
    """
    source = script.read_text()
    text_file = script.with_suffix(".md")
    if text_file.exists():
        return f"{text_file.read_text()}\n## The script\n\n```python\n{source}```\n"
    docstring = ast.get_docstring(ast.parse(source)) or script.stem
    title, _, rest = docstring.removeprefix("# ").partition("\n")
    code = source.split('"""', 2)[2].lstrip("\n") if source.startswith('"""') else source
    figure = script.with_suffix(".png")
    image = f"![Figure of the script]({figure.name})\n" if figure.exists() else ""
    return f"# {title.rstrip('.')}\n{rest}\n\n{image}\n## The script\n\n```python\n{code}```\n"


def convert_alerts(markdown):
    """Replaces GitHub alerts by admonitions of Python-Markdown."""

    def to_admonition(match):
        lines = (line.removeprefix(">").removeprefix(" ") for line in match[2].splitlines())
        body = "\n".join(f"    {line}".rstrip() for line in lines)
        return f"!!! {ADMONITIONS[match[1]]}\n\n{body}\n"

    return ALERT.sub(to_admonition, markdown)


def on_config(config):
    for entry in config.nav:
        if "Guides" in entry:
            recipes = [script_uri(path) for path in find_scripts() if path.parent.name == "recipes"]
            others = ROOT.glob("guides/recipes/*.md")
            recipes += [path.relative_to(ROOT).as_posix() for path in others]
            guides = [script_uri(path) for path in find_scripts() if path.parent.name == "guides"]
            entry["Guides"] = [{"Guides": guides}]
            if recipes:
                entry["Guides"].append({"Recipes": sorted(set(recipes))})
        if "Choose" in entry:
            cards = [p.relative_to(ROOT).as_posix() for p in sorted(ROOT.glob("presets/*.md"))]
            entry["Choose"].append({"Model cards": cards})
            results = sorted(ROOT.glob("benchmarks/*/*.md"))
            pages = ["benchmarks/README.md", *(p.relative_to(ROOT).as_posix() for p in results)]
            entry["Choose"].append({"Results": pages})
    return config


def on_files(files, config):
    generated = {script_uri(path): make_script_page(path) for path in find_scripts()}
    generated["style.css"] = (ROOT / "docs/site/style.css").read_text()
    for path in (*PAGES, *(path for pattern in FOLDERS for path in ROOT.glob(pattern))):
        name = path if isinstance(path, str) else path.relative_to(ROOT).as_posix()
        if name not in generated:
            files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    for name, content in generated.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown, page, config, files):
    source = ROOT / page.file.src_uri
    if page.file.generated_by is None:
        source = ROOT / "docs" / page.file.src_uri
    known = files.src_uris

    def to_site_link(match):
        opening, target, rest = match.groups()
        path = os.path.relpath(os.path.normpath(source.parent / target), ROOT)
        name = path.removeprefix("docs/")
        if path.endswith(".py") and script_uri(ROOT / path) in known:
            name = script_uri(ROOT / path)
        if (ROOT / path).is_dir():  # links to the first page of the folder
            pages = [uri for uri in known if uri.startswith(f"{path}/") and uri.endswith(".md")]
            name = min(pages, default=name)
        if name in known:
            return opening + os.path.relpath(name, os.path.dirname(page.file.src_uri)) + rest
        if config.repo_url and (ROOT / path).exists():
            kind = "tree" if (ROOT / path).is_dir() else "blob"
            return f"{opening}{config.repo_url.rstrip('/')}/{kind}/main/{path}{rest}"
        return f"{opening}missing:{path})" if (ROOT / path).exists() else match[0]

    parts = FENCE.split(markdown)
    for i in range(0, len(parts), 2):  # parts with odd indices are code
        parts[i] = LINK_WITH_TEXT.sub(r"\1", LINK.sub(to_site_link, convert_alerts(parts[i])))
    return "".join(parts)


def on_page_content(html, page, config, files):
    """Links public names in code, which docstrings contain, to their entry in the reference."""
    name = r"<code>(keras_recurrent\.[\w.]+)</code>(?!</a>)"
    return re.sub(name, r'<autoref identifier="\1" optional><code>\1</code></autoref>', html)
