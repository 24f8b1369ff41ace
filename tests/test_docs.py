"""The documentation is whole: pages, links, public names, line lengths, words. Needs no mkdocs."""

import re
from functools import cache
from pathlib import Path

import pytest
import yaml

import fata

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
USER = [ROOT / "README.md", *(p for p in PAGES if "lab" not in p.parts)]
ALL = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]
WIDTH = 100
NOT_WORDS = (  # of words.md: those that have no other meaning on these pages
    "anew",
    "answer",
    "answers",
    "answered",
    "beyond doubt",
    "bear",
    "estranged",
    "evenness",
    "images that come",
    "is refused",
    "larder",
    "points below",
    "surer",
    "surest",
    "taken back",
    "whoever",
    "witness",
)


def named(pages):
    return pytest.mark.parametrize("page", pages, ids=lambda p: p.relative_to(ROOT).as_posix())


def files_of(nav):
    for entry in nav:
        if isinstance(entry, str):
            yield entry
        else:
            for value in entry.values():
                yield from [value] if isinstance(value, str) else files_of(value)


def prose(page):
    """Lines with their numbers, without code blocks."""
    fenced = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and (line[:4].strip() or re.match(r"\s+- |$", line)):
            yield number, line


@cache
def anchors(page):
    """What a link to a page may name after #."""
    found, used = set(), {}
    for _, line in prose(page):
        if heading := re.fullmatch(r"#+ (.+?)(?: \{ #(\S+) \})?", line):
            plain = re.sub(r"[`*]|\[([^]]*)\]\([^)]*\)", r"\1", heading[1])
            slug = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())
            used[slug] = used.get(slug, -1) + 1
            found.add(heading[2] or (f"{slug}_{used[slug]}" if used[slug] else slug))
        if generated := re.fullmatch(r"::: (\S+)", line):
            found.add(generated[1])
    return found


def test_the_navigation_has_every_page():
    nav = list(files_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(nav) == sorted(p.relative_to(DOCS).as_posix() for p in PAGES)


def test_every_page_is_two_clicks_away():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    for section in nav:
        for pages in section.values():  # a page, or pages under one tab
            assert isinstance(pages, str) or all(
                isinstance(page, str) or all(isinstance(file, str) for file in page.values())
                for page in pages
            )


def test_every_public_name_is_in_the_reference():
    text = "\n".join(p.read_text() for p in (DOCS / "api").glob("*.md"))
    generated = set(re.findall(r"^::: fata\.(\w+)$", text, re.MULTILINE))
    described = set(re.findall(r"^#+ .*\{ #fata\.(\w+) \}$", text, re.MULTILINE))
    assert set(fata.__all__) <= generated | described
    index = (DOCS / "api" / "index.md").read_text()
    assert [name for name in fata.__all__ if not re.search(rf"[.`]{name}`", index)] == []


def test_what_the_reference_generates_exists():
    import importlib

    for page in (DOCS / "api").glob("*.md"):
        for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE):
            place, _, last = name.rpartition(".")
            try:
                importlib.import_module(name)
            except ImportError:
                assert hasattr(importlib.import_module(place), last), name


@named(ALL)
def test_links_lead_somewhere(page):
    for number, line in prose(page):
        for target in re.findall(r"\]\(([^)\s]+)\)", line):
            if "://" in target:
                continue
            file, _, anchor = target.partition("#")
            there = (page.parent / file).resolve() if file else page
            assert there.is_file(), f"{page.name}:{number}: {target}"
            if anchor:
                assert anchor in anchors(there), f"{page.name}:{number}: {target}"


@named(ALL)
def test_lines_are_short(page):
    long = [n for n, line in prose(page) if len(line) > WIDTH and line[0] != "|"]
    assert [n for n in long if "://" not in page.read_text().splitlines()[n - 1]] == []


@named(ALL)
def test_words_are_those_of_the_field(page):
    for number, line in prose(page):
        plain = re.sub(r"`[^`]*`", "", line).lower()
        for word in NOT_WORDS:
            assert not re.search(rf"\b{word}\b", plain), f"{page.name}:{number}: {word}"


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    assert "make test" in text
    assert "make test-all" in text


@named([p for p in USER if "```py\n" in p.read_text()])
def test_examples_that_are_not_run_compile(page):
    for code in re.findall(r"```py\n(.*?)```", page.read_text(), re.DOTALL):
        compile(code, page.name, "exec")


@named([ROOT / "README.md", DOCS / "index.md", DOCS / "which-method.md"])
def test_figures_are_those_of_the_results(page):
    known = "".join(p.read_text() for p in (DOCS / "results.md", *(DOCS / "lab").glob("*.md")))
    for number, line in prose(page):
        if line.startswith("|"):
            for figure in re.findall(r"(?<![\d.])\d+\.\d\d(?!\d)", line):
                assert figure in known, f"{page.name}:{number}: {figure}"
