"""What the site shows beside docs/: pages and pictures of the repository, each where it stands.

Links in all pages are those of the repository, so that they work there as well. Here they are made
those of the site: a script is a page of its own, a file of docs/ stands at the top, and what is in
no page is a link to the repository, or only its text where no repository is named.
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


def scripts():
    return sorted(path for pattern in SCRIPTS for path in ROOT.glob(pattern))


def page_of(script):
    """Where a script's page stands: the Markdown beside it, or one that is made of the script."""
    return script.relative_to(ROOT).with_suffix(".md").as_posix()


def page_of_script(script):
    """A script with its docstring in front, or behind the Markdown beside it."""
    source = script.read_text()
    beside = script.with_suffix(".md")
    if beside.exists():
        return f"{beside.read_text()}\n## The script\n\n```python\n{source}```\n"
    docstring = ast.get_docstring(ast.parse(source)) or script.stem
    title, _, rest = docstring.partition("\n")
    code = source.split('"""', 2)[2].lstrip("\n") if source.startswith('"""') else source
    picture = script.with_suffix(".png")
    shown = f"![What the script draws]({picture.name})\n" if picture.exists() else ""
    return f"# {title.rstrip('.')}\n{rest}\n\n{shown}\n## The script\n\n```python\n{code}```\n"


def on_config(config):
    for entry in config.nav:
        if "Guides" in entry:
            recipes = [page_of(path) for path in scripts() if path.parent.name == "recipes"]
            others = ROOT.glob("guides/recipes/*.md")
            recipes += [path.relative_to(ROOT).as_posix() for path in others]
            guides = [page_of(path) for path in scripts() if path.parent.name == "guides"]
            entry["Guides"] = [{"Guides": guides}]
            if recipes:
                entry["Guides"].append({"Recipes": sorted(set(recipes))})
        if "Choose" in entry:
            cards = [p.relative_to(ROOT).as_posix() for p in sorted(ROOT.glob("presets/*.md"))]
            entry["Choose"].append({"Cards": cards})
            results = sorted(ROOT.glob("benchmarks/*/*.md"))
            pages = ["benchmarks/README.md", *(p.relative_to(ROOT).as_posix() for p in results)]
            entry["Choose"].append({"Measurements": pages})
    return config


def on_files(files, config):
    made = {page_of(path): page_of_script(path) for path in scripts()}
    made["style.css"] = (ROOT / "docs/site/style.css").read_text()
    for path in (*PAGES, *(path for pattern in FOLDERS for path in ROOT.glob(pattern))):
        name = path if isinstance(path, str) else path.relative_to(ROOT).as_posix()
        if name not in made:
            files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    for name, content in made.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown, page, config, files):
    source = ROOT / page.file.src_uri
    if page.file.generated_by is None:
        source = ROOT / "docs" / page.file.src_uri
    known = files.src_uris

    def on_the_site(match):
        opening, target, rest = match.groups()
        path = os.path.relpath(os.path.normpath(source.parent / target), ROOT)
        name = path.removeprefix("docs/")
        if path.endswith(".py") and page_of(ROOT / path) in known:
            name = page_of(ROOT / path)
        if (ROOT / path).is_dir():  # the first of its pages
            pages = [uri for uri in known if uri.startswith(f"{path}/") and uri.endswith(".md")]
            name = min(pages, default=name)
        if name in known:
            return opening + os.path.relpath(name, os.path.dirname(page.file.src_uri)) + rest
        if config.repo_url and (ROOT / path).exists():
            kind = "tree" if (ROOT / path).is_dir() else "blob"
            return f"{opening}{config.repo_url.rstrip('/')}/{kind}/main/{path}{rest}"
        return f"{opening}missing:{path})" if (ROOT / path).exists() else match[0]

    parts = FENCE.split(markdown)
    for i in range(0, len(parts), 2):  # the others are code
        parts[i] = LINK_WITH_TEXT.sub(r"\1", LINK.sub(on_the_site, parts[i]))
    return "".join(parts)


def on_page_content(html, page, config, files):
    """Public names in code, which docstrings have many of, link to where they are explained."""
    name = r"<code>(keras_recurrent\.[\w.]+)</code>(?!</a>)"
    return re.sub(name, r'<autoref identifier="\1" optional><code>\1</code></autoref>', html)
