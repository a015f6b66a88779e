"""Pre-train a tiny model: see `reasonlab.train.pretrain`. A named model has its recipe there, with settings to change.

python scripts/pretrain.py --model tiny-1m --device cuda --out runs/base-1m
python scripts/pretrain.py --model tiny-1m --steps 200 --out runs/short
"""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from pathlib import Path

from reasonlab.model.ladder import SIZES
from reasonlab.train.pretrain import RECIPES, Pretraining, pretrain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=RECIPES, default="tiny-1m", help="whose recipe to take")
    for setting in fields(Pretraining):
        flag, kind = f"--{setting.name.replace('_', '-')}", type(setting.default)
        if setting.name == "size":
            parser.add_argument(flag, choices=SIZES)
        elif kind is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction)
        else:
            parser.add_argument(flag, type=kind)
    parser.add_argument("--out", type=Path, required=True)
    arguments = vars(parser.parse_args())
    out, recipe = arguments.pop("out"), RECIPES[arguments.pop("model")]
    changes = {name: value for name, value in arguments.items() if value is not None}
    pretrain(replace(recipe, **changes), out, lambda text: print(text, flush=True))
    print((out / "pretraining.json").read_text())


if __name__ == "__main__":
    main()
