"""Benchmarks: the registry agrees with the data, sources agree with each other, mistakes get an answer that helps."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reasonlab.errors import UserError
from reasonlab.grading.grade import grade
from reasonlab.problems.benchmarks import load_benchmark, load_rows, question_of
from reasonlab.problems.data_command import run
from reasonlab.problems.registry import Benchmark, Hub, benchmarks, find_benchmark, prompts
from reasonlab.problems.sources import ChecksumWarning, MissingDataError, last_boxed, read_rows
from reasonlab.problems.suites import SUITES, find_suite, load_suite

DATA = Path(os.environ.get("REASONLAB_DATA") or Path(__file__).parents[2] / "shared" / "bench")
needs_data = pytest.mark.skipif(not (DATA / "math500.jsonl").is_file(), reason="no benchmark data: set REASONLAB_DATA")
FILES = [entry for entry in benchmarks().values() if entry.file]


@pytest.fixture(autouse=True)
def no_default_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REASONLAB_DATA", raising=False)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def contest_rows(count: int = 30) -> list[dict[str, Any]]:
    return [
        {"id": f"x-{n}", "problem": f"What is {n} + {n}?", "answer": str(2 * n), "source": "s"} for n in range(count)
    ]


# The registry


def test_entries_are_complete() -> None:
    for entry in benchmarks().values():
        assert entry.size
        assert entry.prompt in prompts()
        assert entry.family or entry.file or entry.hub, entry.name
        assert bool(entry.file) == bool(entry.sha256)
        assert (entry.extraction == "choice") == (entry.answer == "choice"), entry.name
        assert all(0 <= baseline.value <= 100 for baseline in entry.baselines)


def test_prompts_hold_the_question_and_say_where_the_answer_goes() -> None:
    question = "How much is {x} for x = 2?"
    for entry in benchmarks().values():
        prompt = entry.prompt_for(question)
        assert prompt.count(question) == 1
        assert entry.extraction == "tiny" or prompt.count("\\boxed{}") == 1


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match="math500"):
        find_benchmark("math_500")


@needs_data
@pytest.mark.parametrize("entry", FILES, ids=lambda entry: entry.name)
def test_every_file_is_the_one_of_the_registry(entry: Benchmark) -> None:
    problems = load_benchmark(entry.name, DATA, strict=True)
    assert entry.size is not None
    assert len(problems) == entry.size - entry.without_gold
    assert len({problem.id for problem in problems}) == len(problems)
    for problem in problems:
        assert problem.question.strip()
        assert problem.answer == problem.answer.strip() != ""
        assert problem.family == entry.name


@needs_data
def test_every_file_there_is_has_an_entry() -> None:
    # `judge bench` keeps scores beside the files it reads: those are not sets.
    present = {path.name for path in DATA.iterdir() if path.name.endswith((".jsonl", ".jsonl.gz"))}
    assert present <= {entry.file for entry in FILES}


@needs_data
@pytest.mark.parametrize(
    ("answer", "pattern"),
    [("integer", r"-?\d+"), ("choice", r"[A-D]+"), ("index", r"-?\d+"), ("rating", r"-1|0|1")],
)
def test_golds_have_the_form_the_registry_says(answer: str, pattern: str) -> None:
    import re

    for entry in FILES:
        if entry.answer == answer:
            assert all(re.fullmatch(pattern, problem.answer) for problem in load_benchmark(entry.name, DATA)), (
                entry.name
            )


# Files


def test_a_wrong_checksum_warns_with_both_hashes_and_is_an_error_when_strict(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "aime24.jsonl", contest_rows())
    mine, registered = hashlib.sha256(path.read_bytes()).hexdigest(), benchmarks()["aime24"].sha256
    with pytest.warns(ChecksumWarning, match=f"{mine}, not {registered}"):
        problems = load_benchmark("aime24", tmp_path)
    assert [problem.answer for problem in problems[:3]] == ["0", "2", "4"]
    with pytest.raises(UserError, match=mine):
        load_benchmark("aime24", tmp_path, strict=True)


@pytest.mark.filterwarnings("ignore::reasonlab.problems.sources.ChecksumWarning")
def test_a_wrong_size_is_an_error(tmp_path: Path) -> None:
    write_rows(tmp_path / "aime24.jsonl", contest_rows(29))
    with pytest.raises(UserError, match=r"30 rows, but .* has 29"):
        load_benchmark("aime24", tmp_path)


@pytest.mark.filterwarnings("ignore::reasonlab.problems.sources.ChecksumWarning")
def test_compression_and_the_environment_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = write_rows(tmp_path / "a" / "aime24.jsonl", contest_rows())
    write_rows(tmp_path / "b" / "aime24.jsonl.gz", contest_rows())
    monkeypatch.setenv("REASONLAB_DATA", str(tmp_path / "b"))
    assert load_benchmark("aime24") == load_benchmark("aime24", plain.parent)
    monkeypatch.setenv("REASONLAB_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"REASONLAB_DATA names .*nowhere"):
        load_benchmark("aime24")


def test_missing_data_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(
        MissingDataError, match=r"put math500\.jsonl .* --data DIR or REASONLAB_DATA.*MATH-500.*--data hub"
    ):
        load_benchmark("math500", tmp_path)
    with pytest.raises(MissingDataError, match="accepting its terms"):
        load_benchmark("gpqa_diamond")


def test_a_cut_archive_is_named(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "mine.jsonl.gz", contest_rows())
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match="not whole"):
        load_benchmark(str(path))


# A user's own file


@pytest.mark.parametrize("column", ["question", "problem", "prompt"])
def test_an_own_file_is_a_benchmark(tmp_path: Path, column: str) -> None:
    rows = [{column: "1+1?", "answer": 2}, {"id": "b", column: "2+2?", "answer": "4", "level": 3}]
    problems = load_benchmark(str(write_rows(tmp_path / "mine.jsonl", rows)))
    assert [(p.id, p.question, p.answer, p.family, p.level) for p in problems] == [
        ("mine-1", "1+1?", "2", "mine", 0),
        ("b", "2+2?", "4", "mine", 3),
    ]


def test_a_chat_counts_as_a_question(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Think."}, {"role": "user", "content": "1+1?"}]
    path = write_rows(tmp_path / "mine.jsonl", [{"prompt": chat, "answer": "2"}])
    assert load_benchmark(str(path))[0].question == "1+1?"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"question": "1+1?", "answer": "2"}\n{"question": "1', "line 2 .* is not JSON"),
        ("[1]\n", "line 1 .* is not an object"),
        ('{"task": "1+1?", "answer": "2"}\n', "line 1 .*found task, answer"),
        ('{"question": "1+1?"}\n', "line 1 .* lacks"),
        ('{"question": "1+1?", "answer": " "}\n', "1 rows .* empty answer"),
    ],
)
def test_mistakes_in_an_own_file_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        load_benchmark(str(path))


def test_an_own_file_that_is_not_there() -> None:
    with pytest.raises(UserError, match=r"no file nowhere\.jsonl"):
        load_benchmark("nowhere.jsonl")


# The hub, on repositories in its format


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    datasets = pytest.importorskip("datasets", reason="needs the extra hub")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    bar = datasets.utils.logging.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    yield tmp_path / "mirror"
    if bar:
        datasets.enable_progress_bars()


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def hub_entry(size: int, **hub: Any) -> Benchmark:
    layout = "choices" if "choices" in hub["columns"] else "plain"
    return Benchmark(name="set", title="", licence="", layout=layout, size=size, hub=Hub(repo="some/set", **hub))


def test_a_registered_set_from_the_hub(mirror: Path) -> None:
    write_rows(mirror / "HuggingFaceH4" / "aime_2024" / "train.jsonl", contest_rows())
    problems = load_benchmark("aime24", f"hub:{mirror}")
    assert len(problems) == 30
    assert (problems[7].id, problems[7].question, problems[7].answer) == ("x-7", "What is 7 + 7?", "14")


def test_configs_splits_filters_and_letters(mirror: Path) -> None:
    rows = [
        {"question": f"{subject}?", "subject": subject, "choices": ["w", "x", "y", "z"], "answer": number}
        for number, subject in enumerate(["astronomy", "law", "anatomy"])
    ]
    card = "---\nconfigs:\n- config_name: all\n  data_files:\n  - split: test\n    path: all/test-*\n---\n"
    write_parquet(mirror / "some" / "set" / "all" / "test-00000-of-00001.parquet", rows)
    (mirror / "some" / "set" / "README.md").write_text(card)
    columns = {"problem": "question", "choices": "choices", "answer": "answer"}
    where = {"subject": ("astronomy", "anatomy")}
    entry = hub_entry(2, config="all", split="test", answer="letter", columns=columns, where=where)
    found = read_rows(entry, f"hub:{mirror}")
    assert [(row["id"], row["answer"]) for row in found] == [("set-0", "A"), ("set-1", "C")]
    assert question_of(entry, found[0]) == "astronomy?\nA. w\nB. x\nC. y\nD. z"


@pytest.mark.parametrize(
    ("kind", "value", "gold"),
    [
        ("plain", "\\frac{1}{2}", "\\frac{1}{2}"),
        ("hash", "so 1,000 + 234\n#### 1,234", "1234"),
        ("boxed", "first \\boxed{1}, then $\\boxed{\\frac{1}{2}}$.", "\\frac{1}{2}"),
        ("list", ["1", "2"], "1,2"),
        ("integer", "51.0", "51"),
    ],
)
def test_golds_of_the_hub(mirror: Path, kind: Any, value: Any, gold: str) -> None:
    write_parquet(mirror / "some" / "set" / "test.parquet", [{"Body": "A pack costs 3", "Q": "How much?", "a": value}])
    entry = hub_entry(1, split="test", answer=kind, columns={"problem": ("Body", "Q"), "answer": "a"})
    (row,) = read_rows(entry, f"hub:{mirror}")
    assert (row["problem"], row["answer"]) == ("A pack costs 3. How much?", gold)


def test_choices_are_shuffled_by_the_id_alone(mirror: Path) -> None:
    rows = [{"Record ID": f"r{n}", "Q": f"{n}?", "right": "yes", "w1": "no", "w2": "never"} for n in range(60)]
    write_parquet(mirror / "some" / "set" / "train.parquet", rows)
    columns = {"id": "Record ID", "problem": "Q", "choices": ("right", "w1", "w2")}
    found = read_rows(hub_entry(60, split="train", answer="first_choice", columns=columns), f"hub:{mirror}")
    assert all(row["choices"]["ABC".index(row["answer"])] == "yes" for row in found)
    assert all(10 <= sum(row["answer"] == letter for row in found) <= 30 for letter in "ABC")
    write_parquet(mirror / "some" / "set" / "train.parquet", rows[::-1])
    again = read_rows(hub_entry(60, split="train", answer="first_choice", columns=columns), f"hub:{mirror}")
    assert again[::-1] == found


def test_mistakes_on_the_hub_are_named(mirror: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(mirror / "some" / "set" / "test.parquet", [{"question": "1+1?", "answer": "2"}])
    wrong = hub_entry(1, split="test", columns={"problem": "problem", "answer": "answer"})
    with pytest.raises(UserError, match=r"no column problem \(it has question, answer\)"):
        read_rows(wrong, f"hub:{mirror}")
    with pytest.raises(UserError, match="must have 2 rows"):
        read_rows(hub_entry(2, split="test", columns={"problem": "question", "answer": "answer"}), f"hub:{mirror}")
    with pytest.raises(MissingDataError, match="cannot load"):
        load_benchmark("math500", f"hub:{mirror}")
    with pytest.raises(MissingDataError, match="not found on the hub"):
        load_benchmark("kaoyan", f"hub:{mirror}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"reasonlab\[hub\]"):
        load_benchmark("math500", f"hub:{mirror}")


@given(st.text("{}\\a", max_size=12))
def test_the_last_box_is_read_with_balanced_braces(inside: str) -> None:
    depth = 0
    for character in inside:
        depth += (character == "{") - (character == "}")
        if depth < 0:
            break
    expected = inside if depth == 0 else None
    if expected is not None:
        assert last_boxed(f"\\boxed{{0}} and \\boxed{{{inside}}} end}}") == inside
    assert last_boxed(inside) == ""


# The tiny world


def test_tiny_sets_never_change_and_their_golds_are_right() -> None:
    digest = hashlib.sha256()
    for name in SUITES["tiny"].benchmarks:
        problems = load_benchmark(name)
        assert len({problem.question for problem in problems}) == benchmarks()[name].size
        assert all(grade(problem, f"Answer:{problem.answer}").verdict == "correct" for problem in problems)
        assert [row["problem"] for row in load_rows(name)] == [problem.question for problem in problems]
        digest.update("\n".join(f"{p.id}\t{p.question}\t{p.answer}" for p in problems).encode())
    assert digest.hexdigest() == "d44e5f2182c5789c60507e2a0320bed93ffc7ec91005fef586dc68f00939fa08"


# Suites


def test_built_in_suites_name_registered_tests() -> None:
    assert {"k15", "acemath7", "mel5", "reasonflux4", "tiny"} <= set(SUITES)
    for suite in SUITES.values():
        assert all(benchmarks()[name].role == "test" for name in suite.benchmarks)
    assert [len(SUITES[name].benchmarks) for name in ("acemath7", "mel5", "reasonflux4")] == [7, 5, 4]


@needs_data
def test_a_suite_loads_what_is_there_and_names_what_is_not() -> None:
    loaded = load_suite("reasonflux4", DATA)
    assert {name: len(problems) for name, problems in loaded.problems.items()} == {
        "aime24": 30,
        "aime25": 30,
        "math500": 500,
    }
    assert "Idavidrein/gpqa" in loaded.missing["gpqa_diamond"]


def test_a_suite_without_any_data_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no benchmark of the suite mel5"):
        load_suite("mel5", tmp_path)


def test_a_users_own_suites(tmp_path: Path) -> None:
    write_rows(tmp_path / "ours.jsonl", contest_rows(3))
    file = tmp_path / "suites.toml"
    file.write_text('[suites.mine]\ntitle = "Ours"\nbenchmarks = ["tiny/sum", "ours.jsonl"]\n')
    for name in (str(file), f"{file}:mine"):
        loaded = load_suite(name)
        assert loaded.suite.title == "Ours"
        assert {key: len(problems) for key, problems in loaded.problems.items()} == {"tiny/sum": 100, "ours": 3}


@pytest.mark.parametrize(
    ("text", "suite", "message"),
    [
        ('[suites.a]\nbenchmarks = ["math5000"]', "", "Perhaps you meant 'math500'"),
        ('[suites.a]\nbenchmark = ["math500"]', "", "unknown key 'benchmark'"),
        ("[suites.a]\nbenchmarks = []", "", "names no benchmarks"),
        ("[suits.a]\nbenchmarks = []", "", "must hold"),
        ("[suites", "", "is not TOML"),
        ('[suites.a]\nbenchmarks = ["svamp"]\n[suites.b]\nbenchmarks = ["svamp"]', "", "several suites.*toml:a"),
        ('[suites.a]\nbenchmarks = ["svamp"]', ":b", "no suite 'b'"),
    ],
)
def test_mistakes_in_a_suite_file_are_named(tmp_path: Path, text: str, suite: str, message: str) -> None:
    file = tmp_path / "suites.toml"
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        find_suite(f"{file}{suite}")


def test_an_unknown_suite_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match="acemath7"):
        find_suite("acemath")


# The command


def test_data_list(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    write_rows(tmp_path / "aime24.jsonl", contest_rows())
    assert run(["list", "--data", str(tmp_path)]) == 0
    lines = capsysbinary.readouterr().out.decode().splitlines()
    row = {line.split()[0]: line for line in lines if line}
    assert row["aime24"].split()[1:4] == ["test", "30", "yes"]
    assert "on the hub" in row["math500"]
    assert "bundled" in row["tiny/gcd"]
    assert row["mel5"].split(maxsplit=1)[1] == "The five sets of MEL"
    assert "none" not in row
    (tmp_path / "bare").mkdir()
    assert run(["list", "--data", str(tmp_path / "bare")]) == 0
    assert f"none of these sets was found in {tmp_path / 'bare'}" in capsysbinary.readouterr().out.decode()
    assert run(["list", "--json", "--data", str(tmp_path)]) == 0
    listed = {entry["name"]: entry for entry in json.loads(capsysbinary.readouterr().out)["benchmarks"]}
    assert listed.keys() == benchmarks().keys()
    assert listed["aime24"]["available"] == "yes"
    assert listed["mmlu_stem"]["hub"]["repo"] == "cais/mmlu"


@pytest.mark.parametrize("words", [["--help"], ["list", "--help"], ["check", "--help"]])
def test_help_has_an_example(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        run(words)
    assert exit_.value.code == 0
    assert "example" in capsys.readouterr().out
