#!/usr/bin/env bash
# Gathers wheels for a GPU machine without network: Linux x86_64, Python 3.12, where torch, transformers, triton,
# matplotlib, rich, numpy and pytest are already installed. Only the small rest is fetched, in the tested versions.
#
#   scripts/device_wheels.sh [tests|trl|vllm ...]      into .wheels/, .wheels/trl/, .wheels/vllm/ (WHEELS=DIR: there)
#
# tests   what the tests need (fetched if nothing is named)
# trl     TRL, for benchmarks/iteration.py
# vllm    vLLM, for benchmarks/iteration.py and rollout.py: built for torch 2.11.0, which must be there
#
# There:  python -m pip install --no-index --no-deps .wheels/*.whl && PYTHONPATH=src python -m pytest -m gpu
# Peers are better kept apart from our own runs: python -m pip install --no-index --no-deps --target PEERS …/*.whl, and
# PYTHONPATH=PEERS:src for the benchmarks that need them.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
wheels="${WHEELS:-$root/.wheels}"
python="$root/.venv/bin/python"
[ -x "$python" ] || { echo "error: no .venv here. Run make install first." >&2; exit 2; }

tests=(
  pydantic pydantic-core annotated-types typing-inspection typing-extensions
  orjson math-verify latex2sympy2-extended antlr4-python3-runtime
  hypothesis sortedcontainers pytest-timeout
)
trl=(
  trl datasets dill multiprocess xxhash fsspec accelerate psutil pyyaml
  httpx httpcore h11 anyio sniffio certifi idna requests urllib3 charset-normalizer
  aiohttp aiosignal aiohappyeyeballs attrs frozenlist multidict propcache yarl
)
# Everything that `from vllm import LLM` and its GPU worker import. Not what only other models, quantised weights, images
# or speculative decoding need: flashinfer, numba, OpenCV, CUTLASS, TileLang.
vllm=(
  vllm==0.22.0
  pydantic pydantic-core annotated-types typing-inspection typing-extensions pydantic-extra-types pydantic-settings
  "mistral-common>=1.11.2" pycountry jsonschema jsonschema-specifications referencing rpds-py
  "openai>=2,<3" jiter distro openai-harmony "anthropic>=0.71,<1" docstring-parser "mcp<2" httpx-sse sse-starlette pyjwt
  fastapi starlette annotated-doc uvicorn uvloop httptools websockets watchfiles python-dotenv python-multipart click
  email-validator dnspython "model-hosting-container-standards>=0.1.14,<1" jmespath supervisor
  "xgrammar>=0.2,<1" "apache-tvm-ffi>=0.1.11" "llguidance>=1.7,<1.8" outlines-core==0.2.14 lark==1.2.2 diskcache==5.6.3
  lm-format-enforcer==0.11.3 interegular partial-json-parser
  "gguf>=0.17" compressed-tensors==0.15.0.1 loguru depyf==0.20.0 astor fastsafetensors einops
  msgspec pyzmq cloudpickle cachetools blake3 py-cpuinfo cbor2 pybase64 ijson six ninja setproctitle python-json-logger
  prometheus-client prometheus-fastapi-instrumentator opentelemetry-api opentelemetry-sdk
  opentelemetry-semantic-conventions opentelemetry-semantic-conventions-ai importlib-metadata zipp
)

fetch() { # directory, packages
  local dir="$1"
  shift
  mkdir -p "$dir"
  rm -f "$dir"/*.whl
  "$python" -m pip download --quiet --dest "$dir" --constraint "$root/constraints.txt" \
    --no-deps --only-binary=:all: --implementation cp --python-version 3.12 \
    --platform manylinux_2_31_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 \
    --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    "$@"
  echo "$(find "$dir" -maxdepth 1 -name '*.whl' | wc -l) wheels, $(du -shS "$dir" | cut -f1), in $dir"
}

for group in "${@:-tests}"; do
  case "$group" in
    tests) fetch "$wheels" "${tests[@]}" ;;
    trl) fetch "$wheels/trl" "${trl[@]}" ;;
    vllm) fetch "$wheels/vllm" "${vllm[@]}" ;;
    *) echo "error: there is no group $group. Name tests, trl or vllm." >&2; exit 2 ;;
  esac
done
