"""The command line. Only the command that runs is imported: `reasonlab --help` answers without torch.

Exit codes: 0 done, 1 failure, 2 usage or something the user can mend, 130 interrupted (and saved).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from reasonlab import __version__
from reasonlab.errors import UserError
from reasonlab.options import Parser, add_device_argument, check_resumed, given_options, without_overrides

COMMANDS = {
    "demo": "watch a tiny model learn to think by RL, in minutes on a laptop; figure and summary at the end",
    "study": "reproduce a published figure: train every arm, draw it, judge the source's claims",
    "train": "run a recipe, continue an interrupted run, or check a recipe with --dry-run",
    "eval": "score a model, a GGUF file or an endpoint on benchmarks, with intervals",
    "grade": "grade predictions in a JSONL file against their golds",
    "merge": "merge models of one architecture by arithmetic on their weights",
    "judge": "train models that judge answers or steps, score pools with them, measure how well they do",
    "select": "choose the best responses of a pool by a judge's scores, to train on",
    "compare": "compare two runs or answer files, paired by problem: difference, interval, flips",
    "data": "list the benchmarks, check training pools for overlap, curate them, sample models for training data",
    "models": "list the models, get language models by name or from the hub, merge LoRA adapters",
    "figures": "draw the figures of a run or a study again",
    "bench": "measure the engine, and check its logprobs against the learner's",
}

TRAIN_OPTIONS = ("--out", "--resume", "--minutes", "--dry-run", "--help")  # all others are keys of the recipe
_RESUMED = "A run continues with the settings it was started with; only --minutes may be given"
_LENGTHENED = "A run continues with the settings it was started with; only --minutes and --iterations may be given"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point: dispatch to a command and turn user errors into one line and exit code 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if words[0] in ("-V", "--version"):
        print(f"reasonlab {__version__}")
        return 0
    try:
        return _command(words[0])(words[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe went away
        sys.stderr.close()
        return 1


def _help() -> str:
    lines = ["usage: reasonlab COMMAND [options]", "", "A laboratory for reasoning models.", "", "commands:"]
    lines += [f"  {name:<8} {text}" for name, text in COMMANDS.items()]
    return "\n".join([*lines, "", "example: reasonlab demo", "help on one command: reasonlab COMMAND --help"])


def _command(name: str) -> Callable[[list[str]], int]:
    commands = {
        "demo": _demo,
        "study": _study,
        "train": _train,
        "eval": _eval,
        "grade": _grade,
        "merge": _merge,
        "judge": _judge,
        "select": _select,
        "compare": _compare,
        "data": _data,
        "models": _models,
        "figures": _figures,
        "bench": _bench,
    }
    if name not in commands:
        import difflib

        near = difflib.get_close_matches(name, commands, n=1)
        hint = f"Perhaps you meant `reasonlab {near[0]}`" if near else "Run `reasonlab --help` for the commands"
        raise UserError(f"there is no command {name!r}", hint)
    return commands[name]


def _parser(name: str, example: str, **more: str) -> argparse.ArgumentParser:
    return Parser(
        prog=f"reasonlab {name}",
        description=COMMANDS[name],
        epilog=f"example: {example}" + more.get("epilog", ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def _check_minutes(minutes: float) -> None:
    if not minutes > 0:
        raise UserError(f"--minutes {minutes:g} leaves no time to train", "Give a positive number")


def _demo(words: list[str]) -> int:
    parser = _parser("demo", "reasonlab demo --seed 1 --out runs/my-demo")
    parser.add_argument("--out", type=Path, help="new directory for the run (default: runs/demo-N)")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="continue the demo in this directory")
    parser.add_argument("--seed", type=int, help="default: 0")
    parser.add_argument("--minutes", type=float, default=4.0, help="stop training early to end within this time")
    parser.add_argument("--threads", type=int, help="CPU worker threads (default: 2)")
    arguments = parser.parse_args(words)
    _check_minutes(arguments.minutes)
    if arguments.resume is not None:
        if any(given is not None for given in (arguments.out, arguments.seed, arguments.threads)):
            raise UserError("--resume takes no other options", _RESUMED)
        from reasonlab.studies.demo import resume_demo

        return resume_demo(arguments.resume, arguments.minutes)
    from reasonlab.studies.demo import run_demo

    threads = 2 if arguments.threads is None else arguments.threads
    return run_demo(arguments.out, arguments.seed or 0, arguments.minutes, threads)


def _study(words: list[str]) -> int:
    parser = _parser("study", "reasonlab study k15-dynamics --scale cpu --out runs/k15")
    studies = ["k15-dynamics", "long2short", "mel-vs-grpo", "rm-scaling", "prm-selection"]
    parser.add_argument("study", choices=studies, metavar="|".join(studies))
    parser.add_argument("--scale", choices=["cpu", "gpu", "paper"], default="cpu")
    parser.add_argument("--seeds", type=int, metavar="N", help="how many training seeds (default: the recipe's)")
    parser.add_argument("--seed", type=int, default=0, help="the first of them")
    parser.add_argument("--out", type=Path, help="where it goes and is continued (default: runs/STUDY-SCALE)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at the same time, in processes")
    parser.add_argument("--arms", default="", help="only these arms of the recipe, comma-separated")
    parser.add_argument("--recipe", type=Path, metavar="FILE", help="a study recipe of your own instead of a scale's")
    parser.add_argument("--model", default="", help="instead of the model that the recipe's arms share")
    parser.add_argument("--data", default="", metavar="DIR", help="directory with the sets that a recipe names")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="instead of the recipe's")
    parser.add_argument("--threads", type=int, help="CPU worker threads of each run")
    parser.add_argument("--dry-run", action="store_true", help="check the recipe and estimate memory, tokens and time")
    arguments = parser.parse_args(words)
    arguments.words = words
    if min(arguments.jobs, 1 if arguments.seeds is None else arguments.seeds) < 1:
        raise UserError("--jobs and --seeds are at least 1", "For instance --seeds 3 --jobs 3")
    from reasonlab.studies.command import run

    return run(arguments)


def _train(words: list[str]) -> int:
    from reasonlab.config import describe

    keys = "\n\nrecipe keys, each also an override (--learner.lr 1e-4):\n" + describe() if "--help" in words else ""
    parser = _parser("train", "reasonlab train recipes/smoke.toml --out runs/smoke --seed 1", epilog=keys)
    parser.add_argument("recipe", type=Path, nargs="?", help="a TOML file")
    parser.add_argument("--out", type=Path, help="new directory for the run (default: runs/RECIPE-N)")
    parser.add_argument(
        "--resume", type=Path, metavar="RUN", help="continue this run; with --iterations N also one that has ended"
    )
    parser.add_argument(
        "--minutes", type=float, metavar="M", help="begin no iteration after M minutes; evaluate and save"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the recipe resolved, check its files and plan its memory"
    )
    own, overrides = without_overrides(words, TRAIN_OPTIONS)
    arguments = parser.parse_args(own)
    if arguments.minutes is not None:
        _check_minutes(arguments.minutes)
    if arguments.resume is not None:
        from reasonlab.config import Config, apply_overrides

        others = {*given_options(overrides)} - {"--iterations"} or arguments.out or arguments.dry_run
        check_resumed("train", arguments.recipe, bool(others), _LENGTHENED)
        iterations = apply_overrides(Config(), overrides).iterations if overrides else None
        from reasonlab.train.command import resume_run

        return resume_run(arguments.resume, arguments.minutes, iterations)
    from reasonlab.config import Config, apply_overrides, load_recipe, to_toml

    if arguments.recipe is None:
        apply_overrides(Config(), overrides)  # a misspelt option may have taken the recipe for its value
        raise UserError("train needs a recipe, or --resume RUN", "For instance: reasonlab train recipes/smoke.toml")
    config = apply_overrides(load_recipe(arguments.recipe), overrides)
    if arguments.dry_run:
        print(to_toml(config), end="", flush=True)
        from reasonlab.train.plan import rehearse

        rehearse(config, lambda text: print(text, file=sys.stderr))  # the output is the recipe alone
        return 0
    from reasonlab.train.command import start_run

    out = arguments.out or free_directory(arguments.recipe.stem)
    return start_run(config, out, ["train", *words], arguments.minutes)


def _eval(words: list[str]) -> int:
    example = "reasonlab eval tiny-1m --suite tiny --k 4"
    more = "\n         reasonlab eval http://localhost:8000/v1 --suite mel5 --data ~/sets --k 8 --out evals/served"
    parser = _parser("eval", example, epilog=more)
    model_help = (
        "a bundled model's name, a checkpoint directory, a GGUF file, or an endpoint's URL (http://host:port/v1)"
    )
    parser.add_argument("model", nargs="?", help=model_help)
    what = parser.add_argument_group("what is asked")
    what.add_argument("--suite", help="a suite (tiny, k15, acemath7, mel5, reasonflux4, FILE.toml:NAME); default: tiny")
    what.add_argument("--benchmark", action="append", metavar="NAME", help="a set, or your .jsonl file; repeatable")
    what.add_argument("--data", metavar="DIR", help="directory with the benchmarks, or hub (default: $REASONLAB_DATA)")
    what.add_argument("--limit", type=int, metavar="N", help="ask at most N problems of each benchmark")
    what.add_argument("--split", choices=["validation", "test", "harder"], help="suite tiny only (default: validation)")
    what.add_argument("--problems", type=int, metavar="N", help="suite tiny only (default: 480)")
    what.add_argument("--levels", default="", help="suite tiny only, comma-separated (default: 2,3,4,5; harder: 6,7)")
    what.add_argument("--trained-on", type=Path, metavar="POOL", help="flag benchmarks in POOL's overlap report")
    how = parser.add_argument_group("how answers are sampled and read")
    how.add_argument("--k", type=int, default=1, help="answers to each problem")
    how.add_argument("--temperature", type=float, help="default: 1 for the tiny models, else 0.6")
    how.add_argument("--top-p", type=float, help="default: 1 for the tiny models, else 0.95")
    how.add_argument("--max-tokens", type=int, help="default: 160 for the tiny models, else 4096")
    how.add_argument("--seed", type=int, default=0, help="of the draws; another one samples anew (default: 0)")
    how.add_argument("--force", choices=["", "think"], default="", help="think: force the tiny models' worked style")
    how.add_argument("--template-arg", action="append", metavar="NAME=VALUE", help="for the chat template; repeatable")
    how.add_argument("--extraction", default="", metavar="POLICY", help="boxed, tag, hash, marker, explicit or free")
    choose = parser.add_argument_group("choosing among the answers with a judge (docs/judges.md)")
    choose.add_argument("--judge", metavar="J", help="directory of a judge, or of its training; or exact (tiny world)")
    choose.add_argument("--best-of", type=int, metavar="N", help="choose one of N answers, 2 <= N <= k (default: k)")
    choose.add_argument("--judge-kind", metavar="KIND", help="where the judge's files do not say")
    choose.add_argument("--steps", choices=["mean", "min", "product", "last"], default="mean", help="of step scores")
    choose.add_argument("--alpha", type=float, default=1.0, metavar="A", help="steps + A * final, where there are both")
    where = parser.add_argument_group("where it runs")
    where.add_argument("--threads", type=int, default=2)
    add_device_argument(where)
    where.add_argument("--endpoint-model", metavar="NAME", help="which model of the endpoint")
    where.add_argument("--api-key-env", default="OPENAI_API_KEY", metavar="VARIABLE", help="holds the endpoint's key")
    where.add_argument("--concurrency", type=int, default=16, help="requests under way at the same time")
    where.add_argument("--retries", type=int, default=5, help="further attempts for each answer")
    where.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="for each request")
    result = parser.add_argument_group("what comes out")
    result.add_argument("--out", type=Path, help="directory to record in, and to continue; or a FILE.jsonl for answers")
    rescore_help = "grade the answers of DIR again, asking nothing; into --out, or else into DIR itself"
    result.add_argument("--rescore", type=Path, metavar="DIR", help=rescore_help)
    result.add_argument("--json", action="store_true", help="print the scores as JSON")
    arguments = parser.parse_args(words)
    arguments.given = given_options(words)
    from reasonlab.evaluate.command import evaluate_model

    return evaluate_model(arguments)


def _grade(words: list[str]) -> int:
    parser = _parser("grade", "reasonlab grade answers.jsonl --out graded.jsonl")
    parser.add_argument("file", type=Path, help="rows with prediction, gold and optional kind, benchmark, question")
    parser.add_argument("--out", type=Path, help="write the graded rows here (default: standard output)")
    parser.add_argument("--policy", default="", help="boxed, tag, hash, marker, explicit or free")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    arguments = parser.parse_args(words)
    from reasonlab.grading.command import run

    return run(arguments)


def _merge(words: list[str]) -> int:
    from reasonlab.methods.merge_command import run

    return run(words)


def _judge(words: list[str]) -> int:
    from reasonlab.judges.command import run

    return run(words)


def _select(words: list[str]) -> int:
    from reasonlab.judges.select_command import run

    return run(words)


def _compare(words: list[str]) -> int:
    from reasonlab.evaluate.compare_command import run

    return run(words)


def _data(words: list[str]) -> int:
    from reasonlab.problems.data_command import run

    return run(words)


def _models(words: list[str]) -> int:
    from reasonlab.model.get_command import run

    return run(words)


def _figures(words: list[str]) -> int:
    parser = _parser("figures", "reasonlab figures runs/demo-1")
    parser.add_argument("directory", type=Path, metavar="DIR", help="a run, or the directory of a study")
    parser.add_argument("--out", type=Path, help="where to write (default: into it)")
    arguments = parser.parse_args(words)
    from reasonlab.figures.redraw import redraw

    files = redraw(arguments.directory, arguments.out or arguments.directory)
    print(f"wrote {', '.join(map(str, files))}")
    return 0


def _bench(words: list[str]) -> int:
    parser = _parser("bench", "reasonlab bench rollout --check")
    parser.add_argument("what", choices=["rollout"])
    parser.add_argument("--model", default="tiny-1m", help="a bundled model's name or a checkpoint directory")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--rows", type=int, default=256, help="rollouts decoded at the same time")
    parser.add_argument("--threads", type=int, default=2)
    add_device_argument(parser)
    parser.add_argument("--float32", action="store_true", help="on CUDA: fp32 instead of bf16")
    parser.add_argument("--check", action="store_true", help="compare the engine's logprobs with the learner's")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(words)
    from reasonlab.rollout.bench import bench_rollout

    return bench_rollout(arguments)


def free_directory(stem: str) -> Path:
    """The first of runs/STEM-1, runs/STEM-2, … that does not exist."""
    number = 1
    while (path := Path("runs") / f"{stem}-{number}").exists():
        number += 1
    return path


if __name__ == "__main__":
    sys.exit(main())
