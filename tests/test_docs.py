"""The pages hold together: every link leads somewhere, every table is one."""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def anchors(page: Path) -> set[str]:
    """What its headings are called in a link, as GitHub names them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if not link.startswith("http"):
            path, _, anchor = link.partition("#")
            there = page.parent / path if path else page
            assert there.exists(), link
            assert not anchor or anchor in anchors(there), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_tables(page: Path) -> None:
    """A header, a rule, rows of as many cells: a table that an empty line cuts in two is text from there on."""
    lines = page.read_text(encoding="utf-8").splitlines()
    for is_table, block in groupby(lines, key=lambda line: line.startswith("|")):
        rows = list(block)
        if is_table:
            assert len(rows) > 2 and re.fullmatch(r"\|( -+:? \|)+", rows[1]), rows[0]
            assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1, rows[0]
