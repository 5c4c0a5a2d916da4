"""The command `mva-ref`: study, methods."""

import argparse
import json
import os
import sys
from pathlib import Path

from . import __version__
from .types import ArgumentError


def _layers(text: str) -> tuple[int, ...] | None:
    if text == "all":
        return None
    try:
        return tuple(int(x) for x in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"is {text!r}; wanted 'all' or numbers like 0,10,29") from None


def _workers(text: str) -> int:
    """A number of processes; 0 for the cores that this process may use."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"is {text!r}; wanted a number, 0 for one a core")
    return int(text) or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def _study(args: argparse.Namespace) -> int:
    try:
        from analysis.report import write_report
        from analysis.study import Config, compute, quick
    except ModuleNotFoundError as missing:
        print(f"mva-ref study needs {missing.name}: pip install 'mva-ref[models]'", file=sys.stderr)
        return 2
    config = Config(model=args.model, layers=args.layers, seed=args.seed)
    out = Path(args.out) if args.out else Path("results") / ("study-quick" if args.quick else "study")
    config = quick(config) if args.quick else config
    try:
        table = compute(config, out, args.workers)
    except KeyboardInterrupt:
        print("\nInterrupted. What is done is kept: the same command goes on from there.", file=sys.stderr)
        return 130
    print(write_report(table, json.loads((out / "study.json").read_text()), out))
    return 0


def _methods(args: argparse.Namespace) -> int:
    import mva_ref

    print(mva_ref.registry.table())
    return 0


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="mva-ref", description="References and verification for MVA linear attention.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    study = commands.add_parser("study", help="approximation error of every method against softmax attention on a real model")
    study.add_argument("--model", default="smollm2", help="smollm2 (default), a local folder, or a name on the hub")
    study.add_argument("--layers", type=_layers, default=(0, 10, 29), help="0,10,29 (default), or all")
    study.add_argument("--quick", action="store_true", help="fewer cases, shorter texts: a minute, to see that everything works")
    study.add_argument("--seed", type=int, default=0, help="seed of the fitted gates")
    study.add_argument("--workers", type=_workers, default=_workers("0"), help="processes, one a core by default; same numbers for any")
    study.add_argument("--out", help="folder for the results; results/study by default")
    study.set_defaults(run=_study)
    commands.add_parser("methods", help="the registry, as a table").set_defaults(run=_methods)
    args = parser.parse_args(argv)
    try:
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever reads, `head` for one, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ArgumentError, ValueError, FileNotFoundError, ImportError) as error:
        print(f"mva-ref {args.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
