#!/usr/bin/env bash
# Gathers wheels for a GPU machine without network: Linux x86_64, Python 3.12, where torch, transformers, triton,
# matplotlib, rich, numpy and pytest are already installed. Only the small rest is fetched, in the tested versions.
#
#   scripts/device_wheels.sh [DIR=.wheels]
#
# There:  python -m pip install --no-index --no-deps .wheels/*.whl && PYTHONPATH=src python -m pytest -m gpu
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
dir="${1:-$root/.wheels}"
python="$root/.venv/bin/python"
[ -x "$python" ] || { echo "error: no .venv here. Run make install first." >&2; exit 2; }

packages=(
  pydantic pydantic-core annotated-types typing-inspection typing-extensions
  orjson math-verify latex2sympy2-extended antlr4-python3-runtime
  hypothesis sortedcontainers pytest-timeout
)

mkdir -p "$dir"
rm -f "$dir"/*.whl
"$python" -m pip download --quiet --dest "$dir" --constraint "$root/constraints.txt" \
  --no-deps --only-binary=:all: --implementation cp --python-version 3.12 \
  --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
  "${packages[@]}"
echo "$(ls "$dir" | wc -l) wheels, $(du -sh "$dir" | cut -f1), in $dir"
