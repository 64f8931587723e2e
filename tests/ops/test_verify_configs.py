"""Claim: the kernel that a CUDA launch takes is the one that docs/kernels/tuning.md names.

Coverage: every row of the table of kernels; head sizes, operands, query rows and work tiles around each
threshold; devices with and without wgmma, with 99, 163 and 227 KiB of shared memory. The table and the choice
are the library's own, compiled for the CPU. Reference: the page's tables, read as they stand; its rule for
wgmma, written here a second time. Tolerance: none.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EMULATION = Path(__file__).resolve().parent / "plan_emulation"
PAGE = ROOT / "docs" / "kernels" / "tuning.md"
OPERANDS = ("16-bit", "fp8, other query", "e4m3 query")
SMS = 132
#: Bytes of shared memory that a thread block may have: compute capability 8.6, 8.0, 9.0.
SHARED = (99 << 10, 163 << 10, 227 << 10)
#: Whether there is wgmma, and shared memory.
DEVICES = ((True, SHARED[-1]), *((False, shared) for shared in SHARED))
HEAD_SIZES = (64, 96, 128, 256)


@dataclass(frozen=True)
class Config:
    """A row of `kConfigs`."""

    head_size: int
    operands: int
    mainloop: int
    row_tiles: int
    row_groups: int
    tile_groups: int
    key_stages: int
    value_stages: int
    probabilities: int
    ctas_per_sm: int
    shared_bytes: int

    @property
    def rows(self) -> int:
        return 8 * self.row_tiles * self.row_groups

    @property
    def wgmma(self) -> bool:
        return self.mainloop > 0

    @property
    def turns(self) -> bool:
        return self.mainloop == 2

    @property
    def pairs(self) -> bool:
        return self.mainloop == 3


class Kernels:
    """The table of kernels, and the choice among them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._select = library.select_config
        numbers = (ctypes.c_int * 11)()
        self.configs: list[Config] = []
        for index in range(library.config_count()):
            library.read_config(index, numbers)
            self.configs.append(Config(*numbers))

    def select(
        self, head_size: int, operands: int, rows: int, work_tiles: int, *, shared: int = SHARED[-1],
        wgmma: bool = True,
    ) -> tuple[Config, int]:  # fmt: skip
        """Return the configuration, and how many of the rows go at a time."""
        taken = ctypes.c_int(rows)
        found = self._select(head_size, operands, ctypes.byref(taken), work_tiles, SMS, shared, int(wgmma))
        assert found >= 0
        return self.configs[found], taken.value


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("needs a C++ compiler (set CXX)")
    library = tmp_path_factory.mktemp("select") / "select.so"
    includes = [f"-I{EMULATION}", f"-I{ROOT / 'csrc' / 'cuda'}"]
    command = [compiler, "-std=c++20", "-O1", "-fPIC", "-shared", "-D__CUDACC__", *includes]
    subprocess.run([*command, str(EMULATION / "select.cpp"), "-o", str(library)], check=True)
    return Kernels(ctypes.CDLL(str(library)))


def rows_of_page(title: str) -> list[list[str]]:
    """Return the cells of the page's table whose first heading begins with ``title``, its head first."""
    table = re.search(rf"^\| {title}.*\n(?:\|.*\n)+", PAGE.read_text("utf-8"), re.MULTILINE)
    assert table
    lines = [[cell.strip() for cell in line.strip("|\n ").split("|")] for line in table[0].splitlines()]
    return [lines[0], *lines[2:]]


def fewest_rows(head_size: int, operands: int, tiles: int) -> int:
    """Return from how many rows on a launch takes wgmma."""
    if head_size == 96:
        return 1 << 30
    if operands == 2 or (head_size == 256 and operands == 0):
        return 1
    if head_size == 256:
        return 17
    if operands == 0:
        few = tiles < 2 * SMS if head_size == 64 else SMS < 2 * tiles <= 2 * SMS
        return 1 if few else 17
    enough = tiles >= 2 * SMS if head_size == 64 else 2 * tiles < SMS
    return 17 if enough else 25


#: Around every number of work tiles that a rule names.
TILES = sorted({n + d for n in (1, SMS // 2, SMS, 2 * SMS, 10 * SMS) for d in (-1, 0, 1) if n + d > 0})
ROWS = (*range(1, 90), 128, 512)
LAUNCHES = list(itertools.product(HEAD_SIZES, range(3), ROWS, TILES))


def test_wgmma_is_taken_from_so_many_rows_on(kernels: Kernels) -> None:
    for launch in LAUNCHES:
        head_size, operands, rows, tiles = launch
        config, _ = kernels.select(*launch)
        assert config.wgmma == (rows >= fewest_rows(head_size, operands, tiles)), launch


def test_the_page_has_the_rule_for_wgmma() -> None:
    _, *lines = rows_of_page("Head size \\| 16-bit cache \\| fp8 cache, e4m3 query \\| fp8 cache, other")
    assert lines == [
        ["64", "17; 1 if W < 2 S", "1", "25; 17 if W >= 2 S"],
        ["96", "never", "never", "never"],
        ["128", "17; 1 if S / 2 < W <= S", "1", "25; 17 if W < S / 2"],
        ["256", "1", "1", "17"],
    ]


def warpgroups_in_turns(says: str, rows: int) -> int:
    """Return how many take tiles in turns by a cell of the page; 0: none do."""
    if says == "no":
        return 0
    cell = re.fullmatch(r"(\d) warpgroups(?:,? up to (\d+) rows(?:, (\d) above)?)?", says)
    assert cell, says
    return int(cell[1]) if cell[2] is None or rows <= int(cell[2]) else int(cell[3] or 0)


def test_tiles_are_taken_in_turns_as_the_page_says(kernels: Kernels) -> None:
    _, *lines = rows_of_page("Head size \\| 16-bit cache \\| fp8 cache, e4m3 query \\|$")
    page = {int(line[0]): {0: line[1], 2: line[2]} for line in lines}
    for launch in LAUNCHES:
        head_size, operands, rows, tiles = launch
        config, _ = kernels.select(*launch)
        wanted = 0
        if config.wgmma and tiles <= SMS:
            wanted = warpgroups_in_turns(page.get(head_size, {}).get(operands, "no"), rows)
        assert (config.tile_groups if config.turns else 0) == wanted, launch


def test_the_page_has_every_wgmma_configuration(kernels: Kernels) -> None:
    head, *lines = rows_of_page("Head size, kind")
    columns = [int(cell) for cell in head[1:]]
    page: dict[tuple[int, int, bool, int], str] = {}
    for name, *cells in lines:
        size, kind = name.split(", ", 1)
        turns = kind.endswith(", in turns")
        operands = OPERANDS.index(kind.removesuffix(", in turns"))
        for rows, cell in zip(columns, cells, strict=False):
            if cell:
                page[int(size), operands, turns, rows] = cell
    table = {}
    for c in kernels.configs:
        if c.wgmma:
            numbers = f"{c.key_stages}, {c.value_stages}, {c.probabilities}; {c.ctas_per_sm}"
            key = c.head_size, c.operands, c.turns, c.rows
            assert key not in table
            table[key] = f"pairs {numbers}" if c.pairs else numbers
            assert (c.row_groups == 2) == (c.rows == 80)
    assert table == page


@pytest.mark.parametrize(("wgmma", "shared"), DEVICES)
def test_a_launch_gets_the_first_configuration_that_keeps_its_rows_and_fits(
    kernels: Kernels, wgmma: bool, shared: int
) -> None:
    for head_size, operands, rows, tiles in LAUNCHES:
        found, taken = kernels.select(head_size, operands, rows, tiles, shared=shared, wgmma=wgmma)
        # mma.sync takes an e4m3 query as it takes others.
        wanted = operands if found.wgmma else min(operands, 1)
        assert (found.head_size, found.operands) == (head_size, wanted)
        assert found.wgmma <= wgmma
        assert found.shared_bytes <= shared
        rivals = [
            c
            for c in kernels.configs
            if (c.head_size, c.operands, c.wgmma) == (head_size, wanted, found.wgmma)
        ]
        assert taken == min(rows, max(c.rows for c in rivals))
        fit = [c for c in rivals if c.turns == found.turns and c.shared_bytes <= shared]
        keep = [c for c in fit if c.rows >= taken]
        if keep:
            assert found == keep[0]
        else:
            assert found.rows == max(c.rows for c in fit)


def test_no_configuration_is_there_for_nothing(kernels: Kernels) -> None:
    found = {
        kernels.select(head_size, operands, rows, tiles, shared=shared, wgmma=wgmma)[0]
        for wgmma, shared in DEVICES
        for head_size, operands, rows, tiles in LAUNCHES
    }
    assert found == set(kernels.configs)
