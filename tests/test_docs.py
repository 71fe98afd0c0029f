"""The pages hold together: every link leads somewhere, every table is one, every room stands in the design."""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path

import pytest

from tests.test_layers import ROOMS

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


def rooms_in(cell: str) -> set[str]:
    """`kernels/backward` (+ `_mask`, `other`), `errors`: kernels.backward, kernels.backward_mask, kernels.other, ..."""
    rooms, first, inside = set(), "", False
    for opening, name in re.findall(r"(\(\+)|`([\w/]+)[/*]*`|\)", cell):
        if not name:
            inside = bool(opening)
        elif not inside:
            first = name.rstrip("/")
            rooms.add(first)
        else:
            rooms.add(first + name if name[0] == "_" else f"{first.rpartition('/')[0]}/{name}")
    return {room.replace("/", ".") for room in rooms}


def test_every_room_stands_in_the_design() -> None:
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d) \| (.*?) \|", design, re.MULTILINE)
    assert {int(floor): rooms_in(cell) for floor, cell in rows} == {
        floor: set(rooms.split()) - {"kernels"} for floor, rooms in enumerate(ROOMS)
    }


def test_the_readme_runs_as_it_stands() -> None:
    """One session, as a user would type it; without the model that another library makes."""
    blocks = re.findall(r"```python\n(.*?)```", PAGES[0].read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 5
    session: dict[str, object] = {}
    for block in blocks:
        if "import AutoModel" not in block:
            exec(compile(block, "README.md", "exec"), session)
