"""From the MODEL of the command line (bundled name, checkpoint directory, GGUF file, URL) to something that answers."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from reasonlab.errors import UserError
from reasonlab.evaluate.evaluator import FORCED_STYLE
from reasonlab.evaluate.responder import EndpointResponder, EngineResponder, Responder
from reasonlab.hardware import prepare
from reasonlab.model.checkpoint import INDEX, TOKENIZER_FILES, WEIGHTS, load_model
from reasonlab.model.gguf import file_sha256
from reasonlab.model.ladder import resolve_model
from reasonlab.model.text_format import TinyFormat, open_format
from reasonlab.model.transformer import Transformer
from reasonlab.rollout.endpoint import Endpoint
from reasonlab.rollout.engine import Engine
from reasonlab.rollout.types import Sampling

MOST_ROWS = 256
MOST_CUDA_ROWS = 1024
PROMPT_ROOM = 1024  # tokens, for the guess of how many rows fit into memory
CPU_CACHE_BYTES = 4 << 30
CUDA_CACHE_SHARE = 0.6  # of what the weights leave free


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """`identity` tells two models apart in the record; `respond_with` makes the responder once sampling is settled.

    `device` is empty for an endpoint, whose machine is its own affair.
    """

    tiny: bool
    identity: dict[str, Any]
    place: str
    device: str
    sampling: Sampling
    respond_with: Callable[[Sampling, bool], Responder]


def open_model(arguments: argparse.Namespace) -> OpenedModel:
    if arguments.threads < 1:
        raise UserError("--threads is at least 1", "For instance --threads 2")
    if arguments.model.startswith(("http://", "https://")):
        return _open_endpoint(arguments)
    if arguments.endpoint_model:
        raise UserError("--endpoint-model is for endpoints", "Give a URL such as http://localhost:8000/v1 as the model")
    path = Path(arguments.model).expanduser()
    directory = resolve_model(arguments.model)
    device = prepare(arguments.device)
    model = load_model(directory)
    force = FORCED_STYLE if arguments.force else ""
    text_format = open_format(directory, model.config.vocab_size, _template_arguments(arguments), force)
    is_tiny = isinstance(text_format, TinyFormat)
    _check_options(arguments, is_tiny)
    limits = (
        Sampling(temperature=1.0, max_tokens=160, repetition_window=64)
        if is_tiny
        else Sampling(temperature=0.6, top_p=0.95, max_tokens=4096)
    )
    dtype = torch.bfloat16 if device.type == "cuda" and not is_tiny else torch.float32
    model = model.to(device, dtype)

    def respond_with(sampling: Sampling, streaming: bool) -> Responder:
        rows = _rows(model, sampling, arguments.threads)
        engine = Engine(model, rows, arguments.threads)
        return EngineResponder(engine, text_format, 2 * rows * engine.workers if streaming else None)

    return OpenedModel(
        tiny=is_tiny,
        identity={"kind": "checkpoint", "sha256": checkpoint_sha256(directory), "dtype": str(dtype)[6:]},
        place=str(path) if path.exists() else arguments.model,
        device=device.type,
        sampling=_sampling(arguments, limits, text_format.stop_ids),
        respond_with=respond_with,
    )


def _open_endpoint(arguments: argparse.Namespace) -> OpenedModel:
    _check_options(arguments, tiny=False)
    extra = _template_arguments(arguments)
    endpoint = Endpoint(
        url=arguments.model,
        model=arguments.endpoint_model or "",
        key_variable=arguments.api_key_env,
        concurrency=arguments.concurrency,
        attempts=1 + arguments.retries,
        timeout=arguments.timeout,
        extra={"chat_template_kwargs": extra} if extra else {},
    )
    endpoint.connect()
    return OpenedModel(
        tiny=False,
        identity={"kind": "endpoint", "name": endpoint.model},
        place=endpoint.url,
        device="",
        sampling=_sampling(arguments, Sampling(temperature=0.6, top_p=0.95, max_tokens=4096), ()),
        respond_with=lambda sampling, streaming: EndpointResponder(endpoint),
    )


def _check_options(arguments: argparse.Namespace, tiny: bool) -> None:
    if arguments.force and not tiny:
        raise UserError("--force is for the tiny models", "Leave it out, or use --template-arg enable_thinking=true")
    if arguments.template_arg and tiny:
        raise UserError("the tiny models have no template arguments", "Leave out --template-arg")


def _sampling(arguments: argparse.Namespace, default: Sampling, stop_ids: tuple[int, ...]) -> Sampling:
    def given(name: str) -> Any:
        value = getattr(arguments, name)
        return getattr(default, name) if value is None else value

    sampling = Sampling(
        temperature=given("temperature"),
        top_p=given("top_p"),
        max_tokens=given("max_tokens"),
        stop_ids=stop_ids,
        repetition_window=default.repetition_window,
    )
    if sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or sampling.max_tokens < 1:
        raise UserError(
            "sampling needs a temperature of at least 0, a top-p in (0, 1] and at least one token",
            "Check --temperature, --top-p and --max-tokens",
        )
    return replace(sampling, top_p=1.0) if sampling.temperature == 0 else sampling  # nothing is drawn


def _template_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """`--template-arg enable_thinking=false`: values are JSON where they can be, else text."""
    found: dict[str, Any] = {}
    for word in arguments.template_arg or ():
        name, equals, value = word.partition("=")
        if not equals:
            raise UserError(f"--template-arg {word} has no value", "For instance --template-arg enable_thinking=false")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def _rows(model: Transformer, sampling: Sampling, workers: int) -> int:
    """How many answers are decoded at the same time: as many as their keys and values find room for."""
    config, weight = model.config, model.embedding.weight
    token = 2 * config.layers * config.kv_heads * config.head_dim * weight.element_size()
    if weight.device.type == "cuda":
        most, room = MOST_CUDA_ROWS, CUDA_CACHE_SHARE * torch.cuda.mem_get_info()[0]
    else:
        most, room = MOST_ROWS, CPU_CACHE_BYTES / workers
    return max(1, min(most, int(room / (token * (PROMPT_ROOM + sampling.max_tokens)))))


def checkpoint_sha256(directory: Path) -> str:
    """Of all files that decide what the model says: weights, config, tokenizer, template."""
    names = [WEIGHTS, INDEX, "config.json", "generation_config.json", *TOKENIZER_FILES]
    files = {*(directory / name for name in names), *directory.glob("model-*.safetensors")}
    digest = hashlib.sha256()
    for file in sorted(file for file in files if file.is_file()):
        digest.update(f"{file.name} {file_sha256(file)}\n".encode())
    return digest.hexdigest()
