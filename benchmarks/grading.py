"""The grader beside math-verify (both sides boxed), in one run: accuracy, false accepts, speed.

    python benchmarks/grading.py [--data DIR] [--cases FILE] [--golds N] [--peer-golds N] [--sets a,b] [--json FILE]

Four questions. Does it agree with the labelled cases of other projects' tests? Does every benchmark gold match itself,
and its equivalent rewrites? Is a gold whose last integer is off by one ever accepted? How many pairs a second, on one
core? Equal pairs are a gold and itself, so for us they cost a string comparison; rewrites are the harder equal pairs.
Our golds are cached once read, as in use, which helps the rewrites; math-verify parses both sides every time.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from reasonlab.grading.verifier import grade_answer, grade_text

Rewrite = Callable[[str], str]
_HERE = Path(__file__).resolve().parent.parent
SKIPPED = ("processbench", "prm800k", "s1k")  # labels of steps, and whole solutions as answers


def golds_of(path: Path) -> list[str]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        answers = (json.loads(line).get("answer") for line in lines)
        return list(dict.fromkeys(str(answer) for answer in answers if answer not in (None, "", [])))


def off_by_one(gold: str) -> str | None:
    """The gold with its last integer one larger."""
    found = list(re.finditer(r"\d+", gold))
    if not found:
        return None
    last = found[-1]
    return gold[: last.start()] + str(int(last.group(0)) + 1) + gold[last.end() :]


def rewrites(gold: str) -> Iterator[tuple[str, str]]:
    """Other spellings of the same answer, each with the name of its rule."""
    plain = gold.strip()
    yield "dollars", f"${plain}$" if "$" not in plain else f" {plain} "
    if plain.count("{") == plain.count("}"):
        yield "box", rf"\boxed{{{plain}}}"
    yield "spaces", f"  {plain} "
    if not plain.endswith("."):
        yield "full stop", plain + "."
    for rule, old, new in (
        ("dfrac", r"\frac", r"\dfrac"),
        ("tfrac", r"\frac", r"\tfrac"),
        ("frac", r"\dfrac", r"\frac"),
        ("unicode pi", r"\pi", "π"),
        ("unicode infinity", r"\infty", "∞"),
        ("unicode union", r"\cup", "∪"),
        ("unicode minus", "-", "−"),
        ("leq", r"\le ", r"\leq "),
        ("no left", r"\left", ""),
        ("degree sign", r"^\circ", "°"),
        ("degree braces", r"^\circ", r"^{\circ}"),
        ("cdot", r"\cdot", r"\times"),
        ("space after comma", ",", ", "),
    ):
        if old in plain and r"\begin" not in plain:
            new_text = (
                re.sub(re.escape(old) + r"(?![A-Za-z])", lambda _, n=new: n, plain)
                if old[0] == "\\"
                else plain.replace(old, new)
            )
            if rule == "space after comma":
                new_text = re.sub(r",(?!\s|\\|\d{3}(?!\d))", ", ", plain)
            if rule == "no left":
                new_text = re.sub(r"(?<!\\)\\(?:left|right)(?![A-Za-z])", "", plain)
            if new_text != plain and "\\text" not in plain:
                yield rule, new_text
    if re.fullmatch(r"-?\d+", plain):
        yield "trailing zeros", plain + ".00"
        if len(plain.lstrip("-")) > 3:
            yield "thousands", f"{int(plain):,}"
            yield "latex thousands", f"{int(plain):,}".replace(",", "{,}")
        yield "name", f"x = {plain}"
        yield "text", rf"\text{{{plain}}}"
    if match := re.fullmatch(r"(-?)\\d?frac\{(\d+)\}\{(\d+)\}", plain):
        sign, top, bottom = match.groups()
        yield "slash", f"{sign}{top}/{bottom}"
        yield "not reduced", rf"{sign}\frac{{{int(top) * 2}}}{{{int(bottom) * 2}}}"
        yield "spaced braces", rf"{sign}\frac {{ {top} }} {{ {bottom} }}"
    if re.fullmatch(r"-?\d*\.\d+", plain):
        yield "trailing zeros", plain + "0"
    if re.fullmatch(r"\([^()\[\]]*\)|\([^()]*,[^()]*\)", plain):
        yield "left right", rf"\left{plain[:-1]}\right{plain[-1]}"
    if re.fullmatch(r"[A-Za-z]{2,}", plain):
        yield "text", rf"\text{{{plain}}}"
        yield "lower case", plain.lower()
    if match := re.fullmatch(r"\\text\{([^{}\\]*)\}", plain):
        yield "no text", match.group(1)
        yield "mbox", rf"\mbox{{{match.group(1)}}}"


def ours(answer: str, gold: str) -> bool:
    return grade_answer(answer, gold).verdict == "correct"


def boxed(text: str) -> str:
    """As math-verify is meant to be used: in a box, unless the text brings its own."""
    return text if "$" in text or "boxed" in text else f"\\boxed{{{text}}}"


def peer(answer: str, gold: str) -> bool:
    from math_verify import parse, verify

    return bool(verify(parse(boxed(gold)), parse(boxed(answer))))


def timed(grader: Callable[[str, str], bool], pairs: list[tuple[str, str]]) -> tuple[list[bool], float]:
    started = time.perf_counter()
    verdicts = [grader(answer, gold) for answer, gold in pairs]
    return verdicts, time.perf_counter() - started


def measure_set(golds: list[str], peer_golds: int) -> dict[str, Any]:
    sets: dict[str, list[tuple[str, str]]] = {
        "self": [(gold, gold) for gold in golds],
        "off": [(wrong, gold) for gold in golds if (wrong := off_by_one(gold)) is not None],
        "rewrite": [(text, gold) for gold in golds for _, text in rewrites(gold)],
    }
    row: dict[str, Any] = {"golds": len(golds)}
    for name, pairs in sets.items():
        for who, grader, part in (("ours", ours, pairs), ("peer", peer, pairs[:peer_golds])):
            if part:
                verdicts, seconds = timed(grader, part)
                row[f"{name}/{who}"] = 100 * sum(verdicts) / len(part)
                row[f"{name}/{who}/rate"] = len(part) / seconds
    return row


def both(row: dict[str, Any], key: str, form: str, end: str) -> str:
    keys = [f"{key}/{who}{end}" for who in ("ours", "peer")]
    return " / ".join(format(row[key], form) if key in row else "-" for key in keys)


def half(number: int) -> str:
    return "second" if hashlib.sha256(str(number).encode()).digest()[0] & 1 else "first"


def measure_cases(path: Path, with_peer: bool) -> dict[str, Any]:
    from math_verify import parse, verify

    cases = [json.loads(line) for line in path.read_text().splitlines()]
    core = [case for case in cases if case["policy"] is None]

    def our_verdict(case: dict[str, Any]) -> bool:
        return grade_text(case["pred"], case["gold"], "free", case["kind"]).verdict == "correct"

    def peer_verdict(case: dict[str, Any]) -> bool:
        answer = parse(boxed(case["pred"]) if case["kind"] == "answer" else case["pred"])
        return bool(verify(parse(boxed(case["gold"])), answer))

    result: dict[str, Any] = {"core": len(core)}
    for who, grader in (("ours", our_verdict), ("peer", peer_verdict)) if with_peer else (("ours", our_verdict),):
        verdicts = [grader(case) for case in core]
        for part in ("all", "first", "second"):
            chosen = [
                (verdict, case["correct"])
                for verdict, case in zip(verdicts, core, strict=True)
                if part in ("all", half(case["id"]))
            ]
            result[f"{who}/{part}"] = {
                "n": len(chosen),
                "accuracy": 100 * sum(v == c for v, c in chosen) / len(chosen),
                "false accepts": sum(v and not c for v, c in chosen),
                "false rejects": sum(c and not v for v, c in chosen),
            }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = os.environ.get("REASONLAB_DATA") or _HERE.parent / "shared" / "bench"
    parser.add_argument("--data", type=Path, default=Path(default))
    parser.add_argument("--cases", type=Path, default=_HERE.parent / "shared" / "grading" / "cases.jsonl")
    parser.add_argument("--golds", type=int, default=2000, help="golds of each set")
    parser.add_argument("--peer-golds", type=int, default=200, help="pairs of each kind given to math-verify (0: none)")
    parser.add_argument("--sets", default="", help="only these, comma-separated")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    arguments = parser.parse_args()
    grade_answer(r"\int_0^1 x dx", r"\frac{1}{2} \sum_{k=1}^{n} 1")  # start the workers
    results: dict[str, Any] = {}
    if arguments.cases.exists():
        results["cases"] = measure_cases(arguments.cases, arguments.peer_golds > 0)
        for name, row in results["cases"].items():
            print(name, row)
    print("\nreasonlab / math-verify")
    heads = ("golds", "self-match %", "off by one %", "rewrites %", "equal/s", "unequal/s", "rewrites/s")
    print(f"{'':<18}{heads[0]:>6}" + "".join(f"{head:>18}" for head in heads[1:]))
    files = sorted(arguments.data.glob("*.jsonl*")) if arguments.data.is_dir() else []
    for path in files:
        name = path.name.partition(".")[0]
        if name.startswith(SKIPPED) or (arguments.sets and name not in arguments.sets.split(",")):
            continue
        golds = golds_of(path)
        random.Random(0).shuffle(golds)
        row = results[name] = measure_set(golds[: arguments.golds], arguments.peer_golds)

        columns = [(key, ".2f", "") for key in ("self", "off", "rewrite")]
        columns += [(key, ",.0f", "/rate") for key in ("self", "off", "rewrite")]
        cells = [both(row, key, form, end) for key, form, end in columns]
        print(f"{name:<18}{row['golds']:>6}" + "".join(f"{cell:>18}" for cell in cells), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
