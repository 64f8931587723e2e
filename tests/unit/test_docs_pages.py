"""Pages hang together: links lead somewhere, the index has every page, tables are their results'."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.rglob("*.md"), *(ROOT / "benchmarks").rglob("README.md")])
LONGEST = 200

_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = _FENCED.sub("", page.read_text("utf-8"))
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", head).lower() for head in heads]
    return {re.sub(r"[^\w\- ]", "", head).strip().replace(" ", "-") for head in plain}


@pytest.mark.parametrize("page", PAGES, ids=[page.relative_to(ROOT).as_posix() for page in PAGES])
def test_links_lead_somewhere(page):
    text = _FENCED.sub("", page.read_text("utf-8"))
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", text):
        if target.startswith(("http:", "https:")):
            continue
        place = Path(os.path.normpath(page.parent / target)) if target else page
        assert place.exists(), f"{target} of {page.name}"
        if anchor:
            assert anchor in _anchors(place), f"{target}#{anchor} of {page.name}"


def test_the_index_has_every_page():
    index = (DOCS / "README.md").read_text("utf-8")
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")} - {"README.md"}
    assert pages == {page for page in pages if f"]({page})" in index}


@pytest.mark.parametrize("folder", ["kernels", "vllm"])
def test_reference_pages_are_short(folder):
    lengths = {page.name: len(page.read_text("utf-8").splitlines()) for page in (DOCS / folder).glob("*.md")}
    assert lengths
    assert {name for name, lines in lengths.items() if lines > LONGEST} == set()


def test_tables_of_performance_are_up_to_date():
    script = ROOT / "benchmarks" / "performance.py"
    ran = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"run python {script.relative_to(ROOT)}\n{ran.stderr}"
