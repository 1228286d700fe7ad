"""`python -m bench`: measures, keeps the numbers in bench/out/, and writes the tables of docs/benchmarks.md."""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bench.conditions import conditions
from bench.environments import ROOT, environments
from bench.jobs import JOBS, LIBRARIES
from bench.report import Measured, write
from bench.turns import remembered, timed

PAGE = ROOT / "docs" / "benchmarks.md"
OUT = ROOT / "bench" / "out"


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    path = options.read or _kept(_measure(options), options.out)
    found = Measured(**json.loads(path.read_text()))
    if options.page is not None:
        write(options.page, found)


def _measure(options: argparse.Namespace) -> Measured:
    from jackfield.engines.transformers.sample import sample_model

    began = time.perf_counter()
    places = environments(options.libraries)
    jobs = [job for job in JOBS if job.name in options.jobs]
    folder = sample_model()
    runs = {"threads": options.threads, "rounds": options.rounds}
    # First, so that an environment that does not work is found before minutes of timing.
    memory = remembered(places, folder, threads=options.threads) if options.memory else []
    seconds, versions = timed(places, folder, jobs, repeats=options.repeats, **runs)
    about = conditions(seconds, versions, took_s=time.perf_counter() - began, **runs)
    return Measured(seconds, memory, about)


def _kept(measured: Measured, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{time.strftime('%Y-%m-%d-%H%M%S')}.json"
    path.write_text(json.dumps(asdict(measured), indent=1))
    print(path)
    return path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--threads", type=int, default=2, help="torch's threads in each process")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each process in each job")
    parser.add_argument("--repeats", type=int, help="times each case in a turn; else by the job's budget")
    parser.add_argument("--jobs", nargs="*", choices=[job.name for job in JOBS], default=[job.name for job in JOBS])
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="times alone")
    parser.add_argument("--read", type=Path, help="numbers of an earlier run, to write the tables from")
    parser.add_argument("--out", type=Path, default=OUT, help="the folder of the numbers")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page that the tables are written into")
    parser.add_argument("--no-page", dest="page", action="store_const", const=None, help="write no page")
    return parser


if __name__ == "__main__":
    main()
