"""Figures in the tables of README, the overview and the results are in the raw result files."""

import csv
import functools
import re

import pytest

from tests.processes import ROOT

pytestmark = pytest.mark.once

RESULTS = ROOT / "benchmarks/results"
PAGES = sorted(RESULTS.glob("*.md"))
SUMMARY = ["work", "hardware", "this package", "baseline", "factor", "date"]
COLUMNS = ["work", "shape", "dtype", "implementation", "metric", "value", "low", "high"]
COLUMNS += ["unit", "hardware", "date", "run", "versions"]
# A number outside of names and shapes such as H200, 1.3B, float32 and 8×2048.
NUMBER = re.compile(r"(?<![\w.,×-])\d[\d,]*(?:\.\d+)?(?:e-\d+)?(?![\w×]|[.,-]\w)")


def figures(cell):
    return [number.replace(",", "") for number in NUMBER.findall(cell)]


@functools.cache
def raw(name):
    """The figures of a raw file."""
    with (RESULTS / f"raw/{name}.csv").open(newline="") as file:
        return {
            float(line[column])
            for line in csv.DictReader(file)
            for column in ("value", "low", "high")
            if re.fullmatch(r"-?[\d.]+(e[+-]?\d+)?", line[column])
        }


@functools.cache
def all_raw():
    return set().union(*(raw(path.stem) for path in RESULTS.glob("raw/*.csv")))


def is_measured(figure, measured):
    """True if a figure is in `measured`, or is one of them rounded to three digits or more."""
    if float(figure) in measured:
        return True
    whole, _, decimals = figure.partition(".")
    digits = len((whole + decimals).lstrip("0") if decimals else whole.rstrip("0"))
    return digits >= 3 and any(float(f"{value:.{digits}g}") == float(figure) for value in measured)


def is_ratio(factor, ours, baseline):
    decimals = len(factor.partition(".")[2])
    pairs = [(float(a), float(b)) for a in ours for b in baseline]
    ratios = [ratio for a, b in pairs if a and b for ratio in (a / b, b / a)]
    return any(abs(ratio - float(factor)) <= 0.51 * 10**-decimals for ratio in ratios)


def tables(text):
    """[[header cells, cells of the first line, ...], ...]"""
    for block in re.findall(r"(?:^\|.*\n)+", text + "\n", re.MULTILINE):
        lines = [
            [cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()
        ]
        yield [lines[0], *lines[2:]]


def missing(text, measured, header=None):
    """Figures of the columns "this package", "baseline" and "factor" without a source."""
    for columns, *lines in tables(text):
        if "this package" not in columns or (header and columns != header):
            continue
        for line in lines:
            cells = dict(zip(columns, line, strict=True))
            ours, baseline = (figures(cells[c]) for c in ("this package", "baseline"))
            for figure in ours + baseline:
                if not is_measured(figure, measured):
                    yield f"{figure}: {line[0]}"
            for factor in figures(cells.get("factor", "").replace("×", "")):
                if not (is_ratio(factor, ours, baseline) or float(factor) in measured):
                    yield f"factor {factor}: {line[0]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_summary_figures_are_in_the_raw_file_of_the_page(page):
    """A result page starts with a conclusion and its summary; a mistyped figure is found."""
    text = page.read_text()
    title, conclusion, summary = text.split("\n\n")[:3]
    assert title.startswith("# ")
    assert "\n" not in title
    assert len(conclusion.splitlines()) <= 5
    (first, *lines), *_ = tables(summary)
    assert first == SUMMARY
    assert lines
    assert f"(raw/{page.stem}.csv)" in text
    assert list(missing(text, raw(page.stem), SUMMARY)) == []


@pytest.mark.parametrize("page", ["README.md", "docs/benchmarks.md"])
def test_overview_figures_are_in_raw_files(page):
    assert list(missing((ROOT / page).read_text(), all_raw())) == []


def test_decimals_in_text_are_on_the_linked_result_pages():
    """A paragraph has a figure that is on none of the result pages that it links."""
    link = re.compile(r"\]\((?:\.\./|docs/)*((?:benchmarks/results|guides/papers)/\w+\.md)")
    unknown = []
    for page in [ROOT / "README.md", *ROOT.glob("docs/*.md")]:
        for paragraph in re.split(r"\n\n|\n(?=- )", page.read_text()):
            targets = link.findall(paragraph)
            text = re.sub(r"`[^`]*`|\]\([^)]*\)", "", paragraph)
            if not targets or text.startswith("|"):
                continue
            known = " ".join((ROOT / target).read_text() for target in targets).replace("×", " ")
            decimals = {figure for figure in figures(text) if "." in figure}
            unknown += [(page.name, figure) for figure in decimals - {*figures(known)}]
    assert unknown == []


def test_each_raw_file_has_the_same_columns_and_a_page():
    for path in RESULTS.glob("raw/*.csv"):
        with path.open(newline="") as file:
            header, *lines = csv.reader(file)
        assert header == COLUMNS, path.name
        assert all(len(line) == len(header) for line in lines), path.name
        assert (RESULTS / f"{path.stem}.md").exists(), path.name
