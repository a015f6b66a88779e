"""Pre-train a rung of the tiny ladder: see `reasonlab.train.pretrain`.

python scripts/pretrain.py --size tiny-1m --steps 2400 --device cuda --out runs/base-1m
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from reasonlab.model.ladder import SIZES
from reasonlab.train.pretrain import Pretraining, pretrain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny-1m")
    for setting in fields(Pretraining):
        if setting.name != "size":
            kind = type(setting.default)
            parser.add_argument(f"--{setting.name.replace('_', '-')}", type=kind, default=setting.default)
    parser.add_argument("--out", type=Path, required=True)
    arguments = vars(parser.parse_args())
    out = arguments.pop("out")
    pretrain(Pretraining(**arguments), out, lambda text: print(text, flush=True))
    print((out / "pretraining.json").read_text())


if __name__ == "__main__":
    main()
