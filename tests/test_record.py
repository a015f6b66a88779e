"""The run record: whole or absent after kill -9, honest on a full disk, one account of several attempts."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import os
import random
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from reasonlab.errors import UserError
from reasonlab.runs import RunReader, RunRecord
from reasonlab.runs.files import replace_directory, write_aside

SOURCE = Path(__file__).parents[1] / "src"


@pytest.fixture
def record(tmp_path: Path) -> RunRecord:
    return RunRecord.create(tmp_path / "run", "seed = 1\n", ["reasonlab", "train", "tiny.toml"])


def files_under(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


# --- what a run holds ------------------------------------------------------------------------------------


def test_a_run_reads_back_as_it_was_written(record: RunRecord) -> None:
    record.event("checkpoint", step=1, path="checkpoints/step-000001")
    record.metrics(2, {"train/reward/mean": 0.75})
    record.metrics(1, {"train/reward/mean": 0.5, "train/length/mean": np.float32(12)})
    record.metrics(1, {"eval/sums/avg@k": 0.25})
    record.finish("finished")
    reader = RunReader(record.directory)
    assert reader.config_toml == "seed = 1\n"
    assert reader.series("train/reward/mean") == ([1, 2], [0.5, 0.75])
    assert reader.series("eval/sums/avg@k") == ([1], [0.25])
    assert reader.series("never/written") == ([], [])
    first = reader.metrics()[0]
    assert (first["v"], first["attempt"], first["step"], first["train/length/mean"]) == (1, 0, 1, 12.0)
    assert [(event["kind"], event["path"]) for event in reader.events()] == [("checkpoint", "checkpoints/step-000001")]
    assert reader.run["status"] == "finished"
    assert reader.run["attempts"][0]["pid"] == os.getpid()
    assert reader.bad_lines == 0


def test_the_environment_is_described_without_importing_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from reasonlab.runs import RunRecord; RunRecord.create(sys.argv[1], '', []); "
        "assert 'torch' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "3", "MY_PASSWORD": "hunter2"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, check=True)
    text = (tmp_path / "env.json").read_text()
    described = json.loads(text)
    assert described["packages"]["numpy"] == np.__version__
    assert described["variables"]["OMP_NUM_THREADS"] == "3"
    assert "hunter2" not in text


def test_secrets_on_the_command_line_are_masked(tmp_path: Path) -> None:
    given = "eval http://me:s1@host --api-key s2 --hf_token=s3 --x.Password s4 --max-tokens 64 --token --k 8"
    RunRecord.create(tmp_path, "", given.split())
    kept = re.sub(r"\bs\d\b", "***", given)
    assert RunReader(tmp_path).run["argv"] == kept.split()


def test_numbers_json_does_not_know_become_null_and_are_named(record: RunRecord) -> None:
    record.metrics(0, {"a": math.nan, "b": np.float32("inf"), "c": 1.5})
    record.metrics(0, {"d": [0.0, -math.inf], "e": np.array([1.0, 2.0])})
    record.event("alarm", ratio=math.inf)
    (line,) = RunReader(record.directory).metrics()
    assert [line[name] for name in "abcde"] == [None, None, 1.5, [0.0, None], [1.0, 2.0]]
    assert line["nonfinite"] == ["a", "b", "d"]
    steps, series = RunReader(record.directory).series("a")
    assert steps == [0]
    assert math.isnan(series[0])
    assert RunReader(record.directory).events()[0]["nonfinite"] == ["ratio"]


def test_text_that_is_not_unicode_does_not_end_a_run(record: RunRecord) -> None:
    record.rollouts(0, [{"text": "fine π", "n": 1}, {"text": "odd \ud800", "scores": [1.0]}])
    first, second = RunReader(record.directory).rollouts(0)
    assert first["text"] == "fine π"
    assert (second["text"], second["scores"]) == ("odd ?", [1.0])


@pytest.mark.parametrize("name", ["step", "attempt", "nonfinite"])
def test_the_names_of_the_record_itself_are_refused(record: RunRecord, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        record.metrics(0, {name: 1})


def test_rollouts_and_evaluations_are_kept_as_gzip(record: RunRecord) -> None:
    rows = [{"problem": "sum/1/train/000001", "sample": k, "text": "Answer:8\n"} for k in range(3)]
    record.rollouts(12, rows)
    record.rollouts(3, rows[:1])
    record.evaluation("tiny/hard@2", 12, rows)
    record.evaluation("tiny/hard", 7, rows[:2])
    with gzip.open(record.directory / "rollouts" / "000012.jsonl.gz", "rt") as file:
        assert [json.loads(line)["sample"] for line in file] == [0, 1, 2]
    reader = RunReader(record.directory)
    assert reader.rollouts(12)[2] == {"v": 1, "step": 12, **rows[2]}
    assert reader.rollout_steps() == [3, 12]
    assert len(reader.evaluation("tiny/hard@2", 12)) == 3
    assert len(reader.evaluation("tiny/hard", 7)) == 2
    assert reader.evaluation_steps("tiny/hard") == [7]
    assert reader.evaluation_steps("tiny/hard@2") == [12]
    assert reader.evaluation_steps("other") == []
    with pytest.raises(UserError, match="rollouts of step 4"):
        reader.rollouts(4)


def test_a_step_made_again_gives_the_same_bytes(record: RunRecord) -> None:
    rows = [{"text": "Answer:8", "logprobs": [-0.5, -math.inf]}]
    path = record.directory / "rollouts" / "000001.jsonl.gz"
    record.rollouts(1, rows)
    before = path.read_bytes()
    assert before[4:8] == bytes(4)  # where gzip would put the time
    path.unlink()
    RunRecord.resume(record.directory).rollouts(1, rows)
    assert path.read_bytes() == before


# --- attempts --------------------------------------------------------------------------------------------


def test_create_refuses_a_directory_that_holds_a_run(record: RunRecord) -> None:
    with pytest.raises(UserError, match=r"already holds a run.*--resume .*/run, or choose another --out"):
        RunRecord.create(record.directory, "seed = 2\n", [])
    assert RunReader(record.directory).config_toml == "seed = 1\n"


def test_resume_and_reading_need_a_run(tmp_path: Path) -> None:
    for open_run in (RunRecord.resume, RunReader):
        with pytest.raises(UserError, match="there is no run"):
            open_run(tmp_path)


def test_the_highest_attempt_wins_each_step_it_made_again(record: RunRecord) -> None:
    for step in range(6):
        record.metrics(step, {"loss": float(step), "only/first": 1})
    record.sync()
    again = RunRecord.resume(record.directory)
    assert again.attempt == 1
    again.event("resume", step=2)
    again.metrics(2, {"eval/sums/avg@k": 0.5})  # an evaluation the first attempt did not come to
    for step in (3, 4):
        again.metrics(step, {"loss": 10.0 + step})
    reader = RunReader(record.directory)
    assert reader.series("loss") == ([0, 1, 2, 3, 4, 5], [0.0, 1.0, 2.0, 13.0, 14.0, 5.0])
    assert reader.series("only/first")[0] == [0, 1, 2, 5]
    assert reader.series("eval/sums/avg@k") == ([2], [0.5])
    assert [entry["attempt"] for entry in reader.run["attempts"]] == [0, 1]
    assert reader.run["status"] == "running"


def test_a_replaced_nan_is_no_longer_flagged(record: RunRecord) -> None:
    record.metrics(0, {"loss": math.nan, "kl": math.nan})
    record.metrics(0, {"loss": 1.0})
    (line,) = RunReader(record.directory).metrics()
    assert (line["loss"], line["kl"], line["nonfinite"]) == (1.0, None, ["kl"])


def test_one_reader_follows_a_run_that_goes_on(record: RunRecord) -> None:
    reader = RunReader(record.directory)
    assert reader.metrics() == []
    for step in range(3):
        record.metrics(step, {"loss": 1.0})
        assert reader.series("loss")[0] == list(range(step + 1))
    record.finish("interrupted")
    assert reader.run["status"] == "interrupted"


def test_bad_lines_are_counted_once_and_an_unfinished_line_is_not_bad(record: RunRecord) -> None:
    record.metrics(0, {"loss": 1.0})
    (path,) = record.directory.glob("metrics.*.jsonl")
    with path.open("ab") as file:
        file.write(b'not json\n[1, 2]\n{"step": 3}\n{"v":1,"attempt":0,"step":9,"t":1.0,"lo')
    reader = RunReader(record.directory)
    assert reader.bad_lines == 3
    assert reader.series("loss") == ([0], [1.0])
    with path.open("ab") as file:
        file.write(b'ss":2.0}\n')
    assert reader.series("loss") == ([0, 9], [1.0, 2.0])
    assert reader.bad_lines == 3


# --- kill -9 ---------------------------------------------------------------------------------------------

WRITER = """
import os, sys
from reasonlab.runs import RunRecord
record, writer, size = RunRecord(sys.argv[1], 0), int(sys.argv[2]), int(sys.argv[3])
os.write(1, b"ready\\n")
sys.stdin.readline()
for count in range(1, 30_000_000 // size):
    record.event("line", step=count, writer=writer, filling="x" * size)
    os.write(1, b"%d\\n" % count)
sys.stdin.readline()
"""


@pytest.mark.parametrize("size", [300, 60_000])
@pytest.mark.parametrize("trial", [0, 1])
def test_acknowledged_lines_survive_kill_9(record: RunRecord, size: int, trial: int) -> None:
    chance = random.Random(f"{size}/{trial}")
    command = [sys.executable, "-c", WRITER, str(record.directory)]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    writers = [
        subprocess.Popen(
            [*command, str(number), str(size)],
            env=environment,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for number in range(4)
    ]
    outputs = [writer.stdout for writer in writers if writer.stdout]
    assert [output.readline() for output in outputs] == [b"ready\n"] * 4
    for start in [writer.stdin for writer in writers if writer.stdin]:
        start.write(b"\n")
    assert [output.read(1) for output in outputs] == [b"1"] * 4  # all are at work
    live_reader = RunReader(record.directory)
    live_reader.events()
    for writer in writers:
        time.sleep(chance.uniform(0, 0.01))
        writer.kill()
    acknowledged = []
    for writer in writers:
        output, _ = writer.communicate()
        acknowledged.append(int((b"1" + output).rpartition(b"\n")[0].split()[-1]))

    for reader in (live_reader, RunReader(record.directory)):
        assert reader.bad_lines == 0
        lines = reader.events()
        for number, count in enumerate(acknowledged):
            steps = sorted(line["step"] for line in lines if line["writer"] == number)
            assert steps == list(range(1, len(steps) + 1))  # none missing, none twice
            assert count <= len(steps) <= count + 1
        assert all(line["filling"] == "x" * size for line in lines)


# --- disks -----------------------------------------------------------------------------------------------


@contextmanager
def mounted(directory: Path, options: str) -> Iterator[None]:
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)]
    try:
        failed = subprocess.run(command, capture_output=True).returncode != 0
    except FileNotFoundError:
        failed = True
    if failed:
        pytest.skip("mounting a small file system is not allowed here")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Writing past `size` bytes fails half-way, as on a full disk, without the rights to mount one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(params=["small disk", "file size limit"])
def cramped(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A directory that takes the beginnings of a run and then no more."""
    directory = tmp_path / "cramped"
    with mounted(directory, "size=64k") if request.param == "small disk" else largest_file(40_000):
        yield directory


def test_a_full_disk_leaves_no_partial_file(cramped: Path) -> None:
    record = RunRecord.create(cramped / "run", "seed = 1\n", [])
    write_aside(cramped / "kept.bin", b"old")
    before = files_under(cramped)
    noise = random.Random(0).randbytes(80_000)
    with pytest.raises(UserError, match=r"no space left.*Free some space"):
        write_aside(cramped / "kept.bin", noise)
    with pytest.raises(UserError, match="no space left"):
        record.rollouts(1, [{"text": noise.hex()}])
    assert files_under(cramped) == before
    assert (cramped / "kept.bin").read_bytes() == b"old"


def test_a_full_disk_ends_at_a_whole_line_and_writing_can_go_on(cramped: Path) -> None:
    record = RunRecord.create(cramped / "run", "", [])
    steps = itertools.count()

    def fill() -> None:
        for step in steps:
            record.event("line", step=step, filling="x" * 3000)

    with pytest.raises(UserError, match=r"no space left.*another place"):
        fill()
    written = next(steps) - 1
    assert 5 <= written <= 25
    record.event("short", step=written)  # there is room for this one, and it stands on a line of its own
    reader = RunReader(record.directory)
    assert [event["step"] for event in reader.events()] == list(range(written + 1))
    assert reader.bad_lines == 0
    (path,) = record.directory.glob("events.*.jsonl")
    assert path.read_bytes().endswith(b"\n")


def test_a_read_only_disk_is_explained(tmp_path: Path) -> None:
    with (
        mounted(tmp_path / "disk", "size=64k,ro"),
        pytest.raises(UserError, match=r"cannot write.*another place"),
    ):
        RunRecord.create(tmp_path / "disk" / "run", "", [])


def test_a_forbidden_directory_is_explained(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    if os.access(tmp_path, os.W_OK):
        pytest.skip("this user may write everywhere")
    with pytest.raises(UserError, match=r"cannot write.*another place"):
        RunRecord.create(tmp_path / "run", "", [])


@pytest.mark.parametrize("place", ["file", "file/run"])
def test_a_file_in_the_way_is_explained(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match=r"cannot write.*another place"):
        RunRecord.create(tmp_path / place, "", [])
    assert files_under(tmp_path) == {"file"}


# --- directories -----------------------------------------------------------------------------------------


def test_a_directory_takes_the_place_of_another(tmp_path: Path) -> None:
    final = tmp_path / "checkpoints" / "step-000120"
    for content in ("first", "second"):
        aside = tmp_path / "aside"
        (aside / "trainer").mkdir(parents=True)
        (aside / "trainer" / f"{content}.txt").write_text(content)
        final.parent.mkdir(exist_ok=True)
        replace_directory(aside, final)
        assert files_under(tmp_path) == {f"checkpoints/step-000120/trainer/{content}.txt"}
        assert [path.name for path in final.parent.iterdir()] == ["step-000120"]


def test_a_directory_that_cannot_be_put_in_place_is_removed(tmp_path: Path) -> None:
    (tmp_path / "aside").mkdir()
    (tmp_path / "aside" / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="cannot write"):
        replace_directory(tmp_path / "aside", tmp_path / "file" / "step-000120")
    assert files_under(tmp_path) == {"file"}
    assert not (tmp_path / "aside").exists()
