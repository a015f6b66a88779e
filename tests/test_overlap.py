"""Overlap of training pools with benchmarks: found where it is, not where it is not, and taken out."""

from __future__ import annotations

import gzip
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reasonlab.errors import UserError
from reasonlab.problems import overlap
from reasonlab.problems.data_command import run
from reasonlab.problems.overlap import Item, OverlapIndex, normal_form
from reasonlab.problems.training_pools import check_pools, seen_problems, write_clean

DATA = Path(os.environ.get("REASONLAB_DATA") or Path(__file__).parents[2] / "shared" / "bench")

PROBLEM = (
    "A train leaves the station at noon and travels at $60$ miles per hour. A second train leaves the same station at "
    "$2$ o'clock and travels in the same direction at $\\dfrac{180}{2}$ miles per hour. When does it catch up?"
)
OTHER = (
    "Let $f$ be a function from the positive integers to themselves such that $f(m + n) \\geq f(m) + f(f(n)) - 1$ for "
    "all $m$ and $n$. Determine every value that the number $f(2007)$ can take."
)
SHORT = "How many positive perfect squares less than $2023$ are divisible by $5$?"


def found(problem: str, text: str) -> str | None:
    matches = list(OverlapIndex([Item("set", "p", problem), Item("set", "q", OTHER)]).matches([text]))
    return next((match.kind for match in matches if match.problem == "p"), None)


@pytest.mark.parametrize(
    "text",
    [
        PROBLEM,
        PROBLEM.upper().replace(" ", "  ").replace("$", ""),
        PROBLEM.replace("\\dfrac", "\\frac"),
        PROBLEM + "\n[asy]draw((0,0)--(1,1));[/asy]",
    ],
)
def test_exact_copies(text: str) -> None:
    assert found(PROBLEM, text) == "exact"


@pytest.mark.parametrize(
    "text",
    [
        "Solve the following problem step by step.\n\n" + PROBLEM + "\n\nWrite the answer on the last line.",
        PROBLEM.replace("A train leaves", "One train departs from"),
        PROBLEM[: int(len(PROBLEM) * 0.8)],
    ],
)
def test_near_copies(text: str) -> None:
    assert found(PROBLEM, text) == "near"


@pytest.mark.parametrize(
    "text",
    [
        OTHER,
        PROBLEM[:100] + OTHER,
        PROBLEM.replace("60", "75").replace("$2$ o'clock", "$3$ o'clock").replace("180", "210").replace("noon", "ten"),
        "",
        "$",
    ],
)
def test_other_problems_are_not_copies(text: str) -> None:
    assert found(PROBLEM, text) is None


def test_a_short_problem_must_be_there_whole() -> None:
    assert found(SHORT, SHORT + " Give the number of such squares, and explain.") == "near"
    assert found(SHORT, SHORT.replace("2023", "2024")) is None


def test_signs_tell_the_shortest_problems_apart() -> None:
    assert found("Compute $\\tan 22.5^\\circ.$", "Compute $\\tan 225^\\circ$.") is None
    assert found("12+30=?", "12-30=?") is None
    assert found("Simplify: $\\sqrt{245}$", "Simplify $\\sqrt{245}$.") == "exact"


def test_chinese_problems_are_found_too() -> None:
    problem = "已知函数的图像经过两个给定的点，并且在区间上单调递增，求实数参数的取值范围。"
    assert found(problem, "请解答下面的问题：" + problem) == "near"
    assert found(problem, problem.replace("递增", "递减")) is None


def test_a_text_that_repeats_itself_shares_no_more_for_it() -> None:
    assert found(PROBLEM, PROBLEM[:90] * 20) is None


def test_an_instruction_that_many_problems_share_is_no_overlap() -> None:
    instruction = (
        " Enter the letter of the correct option, and nothing else, on the last line of your response, please. "
        "Do not enter more than one letter, and do not repeat the text of the option that you have chosen."
    )
    items = [Item("set", str(number), f"Problem {number}:" + instruction) for number in range(100)]
    assert list(OverlapIndex(items).matches(["A quite different question?" + instruction])) == []
    assert [match.problem for match in OverlapIndex(items).matches(["Problem 7:" + instruction])] == ["7"]


def test_all_owners_of_a_text_are_named_and_rows_are_counted() -> None:
    index = OverlapIndex([Item("a", "1", PROBLEM), Item("b", "2", PROBLEM), Item("b", "3", OTHER)])
    matches = list(index.matches(["nothing", OTHER, "nothing", PROBLEM]))
    assert [(match.row, match.benchmark, match.problem) for match in matches] == [
        (1, "b", "3"),
        (3, "a", "1"),
        (3, "b", "2"),
    ]


def by_definition(problem: str, text: str) -> bool:
    """The rules of the module, in sets of windows."""
    p, t = normal_form(problem), normal_form(text)
    if p == t:
        return True
    width = overlap.LONG_WINDOW if len(p) >= overlap.SHORT_TEXT else overlap.SHORT_WINDOW
    if len(p) < width or p.startswith(b"="):
        return False
    windows = {p[i : i + width] for i in range(len(p) - width + 1)}
    shared = sum(window in t for window in windows)
    if width == overlap.SHORT_WINDOW:
        return shared == len(windows)
    cut = len(t) >= overlap.SHORT_TEXT and shared >= overlap.CUT_SHARE * (len(t) - width + 1)
    return shared >= overlap.NEAR_SHARE * len(windows) or cut


@given(st.data())
def test_the_index_finds_what_the_definition_says(data: st.DataObject) -> None:
    pieces = st.sampled_from(
        ["abcdefghij" * 3, "klmnopqrst" * 4, "uvwxyz0123" * 5, "4", "567", "one two three four five"]
    )
    texts = st.lists(pieces, max_size=7).map(" ".join)
    problems, pool = data.draw(st.lists(texts, max_size=5)), data.draw(st.lists(texts, max_size=5))
    index = OverlapIndex(Item("set", str(number), text) for number, text in enumerate(problems))
    matches = {(match.row, int(match.problem)) for match in index.matches(pool)}
    expected = {(r, p) for r, text in enumerate(pool) for p, q in enumerate(problems) if by_definition(q, text)}
    assert matches == expected


def test_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    index = OverlapIndex([Item("set", "p", PROBLEM), Item("set", "q", OTHER), Item("set", "s", SHORT)])
    pool = [PROBLEM + " Now.", "nothing", SHORT, OTHER, "", PROBLEM, SHORT + " Explain."] * 3
    whole = list(index.matches(pool))
    assert len(whole) == 15
    monkeypatch.setattr(overlap, "BLOCK_BYTES", 200)
    assert list(index.matches(pool)) == whole


# Pools and reports


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    test = [{"id": "t-1", "question": PROBLEM, "answer": "4"}, {"id": "t-2", "question": OTHER, "answer": "1"}]
    train = [
        {"problem": "What is the sum of the first ten primes?", "answer": "129", "extra": [1, {"é": 2.50}]},
        {"problem": PROBLEM, "answer": "4"},
        {"prompt": [{"role": "user", "content": "Please solve this: " + OTHER}], "answer": "1"},
        {"question": "12 + 30 = ?", "answer": "42", "big": 123456789012345678901234567890},
    ]
    return str(write_rows(tmp_path / "train.jsonl", train)), str(write_rows(tmp_path / "test.jsonl", test))


def test_a_pool_is_checked_and_cleaned(files: tuple[str, str], tmp_path: Path) -> None:
    train, test = files
    report = check_pools([train], against=[test, "tiny"])
    (pool,) = report.pools
    assert (pool.rows, pool.overlapping_rows) == (4, (1, 2))
    assert set(pool.benchmarks) == {"test"}
    shared = pool.benchmarks["test"]
    assert (shared.problems, shared.exact, shared.overlapping, shared.ids) == (2, 1, 2, ("t-1", "t-2"))

    out = tmp_path / "deep" / "clean.jsonl"
    assert write_clean(report, [train], out) == 2
    lines = Path(train).read_bytes().splitlines(keepends=True)
    assert out.read_bytes() == lines[0] + lines[3]
    assert check_pools([str(out)], against=[test]).pools[0].overlapping_rows == ()


def test_an_evaluation_can_ask_what_a_pool_had_seen(files: tuple[str, str], tmp_path: Path) -> None:
    train, test = files
    assert seen_problems(Path(train)) is None
    report = check_pools([train], against=[test, "tiny/sum"])
    Path(train + ".overlap.json").write_bytes(report.to_json())
    assert seen_problems(Path(train)) == {"test": {"t-1", "t-2"}, "tiny/sum": frozenset()}
    write_clean(report, [train], tmp_path / "clean.jsonl.gz")
    assert len(gzip.decompress((tmp_path / "clean.jsonl.gz").read_bytes()).splitlines()) == 2
    assert seen_problems(tmp_path / "clean.jsonl.gz") == {"test": frozenset(), "tiny/sum": frozenset()}
    Path(train + ".overlap.json").write_text("{}")
    with pytest.raises(UserError, match="not an overlap report"):
        seen_problems(Path(train))


def test_the_command(files: tuple[str, str], tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    train, test = files
    out = tmp_path / "clean.jsonl"
    assert run(["check", train, "--against", f"{test},tiny/gcd", "--clean", str(out)]) == 0
    text = capfdbinary.readouterr().out.decode()
    assert re.search(r"test +2 +1/2", text)
    assert "2 of 4 rows overlap" in text
    assert "no overlap: tiny/gcd" in text
    assert "wrote 2 of 4 rows" in text
    assert run(["check", train, "--against", test, "--json"]) == 0
    printed = json.loads(capfdbinary.readouterr().out)
    assert printed["pools"][0]["benchmarks"]["test"]["ids"] == ["t-1", "t-2"]
    assert json.loads((tmp_path / "clean.jsonl.overlap.json").read_text())["cleaned"] is True


def test_mistakes_are_named(files: tuple[str, str], tmp_path: Path) -> None:
    train, test = files
    with pytest.raises(UserError, match=r"does not end in \.jsonl"):
        run(["check", train, "--against", test, "--clean", str(tmp_path / "clean.parquet")])
    with pytest.raises(UserError, match="no benchmark"):
        run(["check", train, "--against", "math50"])
    with pytest.raises(UserError, match=r"no file gone\.jsonl"):
        run(["check", "gone.jsonl", "--against", test])
    odd = write_rows(tmp_path / "odd.jsonl", [{"text": "?"}])
    with pytest.raises(UserError, match=r"row 1 .* has no question"):
        run(["check", str(odd), "--against", test])
    assert not list(tmp_path.glob(".*tmp"))


# Against the table that was made with other code


POOLS = ("math_train", "dapo_math_17k", "deepscaler_40k", "s1k", "aime_1983_2023")
# Not copies: tan 22.5° and tan 225° (the table's text has no signs), two triangles that differ in their drawing only.
NO_COPIES = {("math_train", "processbench_math"): 3, ("deepscaler_40k", "processbench_math"): 3}


def published_table() -> dict[tuple[str, str], tuple[int, int]]:
    """(pool, benchmark): (exact, near) from the README beside the data."""
    lines = [line.strip("| \n").split("|") for line in (DATA / "README.md").read_text().splitlines()]
    rows = [[cell.strip() for cell in line] for line in lines if len(line) == 10]
    head = next(row for row in rows if row[0].startswith("eval"))
    cells = {(pool, row[0]): cell for row in rows for pool, cell in zip(head, row, strict=True) if "/" in cell}
    return {key: tuple(map(int, cell.split("/"))) for key, cell in cells.items() if key[0] in POOLS}  # type: ignore[misc]


@pytest.mark.skipif(not (DATA / "README.md").is_file(), reason="no benchmark data: set REASONLAB_DATA")
def test_finds_what_the_published_table_lists() -> None:
    table = published_table()
    assert len(table) == 5 * 13
    report = check_pools(POOLS, DATA, sorted({benchmark for _, benchmark in table}))
    for pool in report.pools:
        for benchmark in report.checked:
            exact, near = table[pool.pool, benchmark]
            allowed = NO_COPIES.get((pool.pool, benchmark), 0)
            mine = pool.benchmarks.get(benchmark)
            assert (mine.exact if mine else 0) >= exact - allowed, (pool.pool, benchmark)
            assert (mine.overlapping if mine else 0) >= near - allowed, (pool.pool, benchmark)
            assert (mine is None) == (near == 0), (pool.pool, benchmark)  # and nothing where the table has nothing
