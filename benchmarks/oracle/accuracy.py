"""How right the oracle is: predicted against measured, five networks under all strategies.

    python benchmarks/oracle/accuracy.py                           everything that is not in the folder yet
    python benchmarks/oracle/accuracy.py --models unet,vgg16       some networks only
    python benchmarks/oracle/accuracy.py --transport gloo          over another transport
    python benchmarks/oracle/accuracy.py --unseen                  two networks that were never looked at
    python benchmarks/oracle/accuracy.py --no-memory               times only, which want quiet cores
    python benchmarks/oracle/accuracy.py --weigh                   the memory of rows that have times only
    python benchmarks/oracle/accuracy.py --keep DIR                keep what predictions were made from, too
    python benchmarks/oracle/accuracy.py --reprice --keep DIR      predict that once more, with other code

Every network is calibrated for, measured and written to the folder on its own, so that a run can be ended
and taken up again; the table is made of all that is there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise import search
from shardwise.commands.accuracy import Row, accuracy, report, repriced, rows_of, tiled
from shardwise.commands.subject import build_model, training_graph
from shardwise.commands.trials import Subject, Trial, measure_memory
from shardwise.commands.validate import PLANS, SIZES, subjects
from shardwise.machine import Machine
from shardwise.plan import Plan
from shardwise.runtime.calibrate import calibrate

HERE = Path(__file__).parent
UNSEEN = "amoebanetd-6-72@3x64x64/8,unet3d@3x16x16x16/8"


def main() -> None:
    """Measure what is missing, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default=",".join(SIZES))
    parser.add_argument("--unseen", action="store_true", help="the two networks kept for last")
    parser.add_argument("--transport", default="mpi4py")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--calibrate-seconds", type=float, default=45.0)
    parser.add_argument("--profile-seconds", type=float, default=150.0, help="for the kernels of a network")
    parser.add_argument("--search-ranks", default="2", help="for which the search's choice is trained too")
    parser.add_argument("--folder", type=Path, default=HERE / "measured")
    parser.add_argument("--output", type=Path, default=HERE / "result.md")
    parser.add_argument("--no-memory", action="store_true", help="times only: no fresh process per plan")
    parser.add_argument("--weigh", action="store_true", help="measure the memory of rows that lack it")
    parser.add_argument("--keep", type=Path, help="folder for the machine and the times of computations")
    parser.add_argument("--reprice", action="store_true", help="predict rows anew from what was kept")
    parser.add_argument("--only-table", action="store_true", help="measure nothing")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.weigh:
        weigh(options)
    elif options.reprice:
        reprice(options)
    elif not options.only_table:
        measure(options)
    options.output.write_text(table(options.folder))


def measure(options: argparse.Namespace) -> None:
    """Calibrate, and validate every network that is not in the folder."""
    for text in (UNSEEN if options.unseen else options.models).split(","):
        (subject,) = subjects([text])
        path = options.folder / f"{options.transport}-{subject.name}.json"
        if path.exists():
            continue
        start = time.monotonic()
        machine = calibrate(None, options.calibrate_seconds, (options.transport,), quiet=True)
        memory = not options.no_memory
        counts = [int(count) for count in options.search_ranks.split(",") if count]
        searched = best_plans(subject, machine, counts, options.profile_seconds / 4)
        plans = [*(str(Plan.parse(tiled(plan, subject))) for plan in PLANS), *searched.values()]
        keep = None if options.keep is None else options.keep / options.transport
        if keep is not None:
            machine.save(_machine_file(keep, subject))
        rows, refused = rows_of(
            [subject], plans, machine, options.repeats, options.profile_seconds, memory, keep
        )
        found = report(rows, refused) | {
            "searched": searched,
            "transport": options.transport,
            "shape": subject.shape,
            "batch": subject.batch,
            "unseen": options.unseen,
            "seconds": time.monotonic() - start,
        }
        path.write_text(json.dumps(found, indent=1))
        mean = found["time_accuracy"]["mean"]
        print(f"{subject.name}: {100 * mean:.1f} % in {found['seconds']:.0f} s", flush=True)


def best_plans(subject: Subject, machine: Machine, counts: list[int], seconds: float) -> dict[int, str]:
    """Return what the search chooses for some numbers of ranks, all of them used."""
    graph = training_graph(build_model(subject.name), subject.shape, subject.batch)
    return {
        ranks: str(search(graph, machine, ranks, profile_seconds=seconds, keep=1, all_ranks=True)[0].plan)
        for ranks in counts
    }


def _machine_file(folder: Path, subject: Subject) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{subject.name}-machine.toml"


def reprice(options: argparse.Namespace) -> None:
    """Predict the rows in the folder anew, from the computations that were timed for them."""
    for path in sorted(options.folder.glob(f"{options.transport}-*.json")):
        found = json.loads(path.read_text())
        rows = [Row(**row) for row in found["rows"]]
        subject = Subject(rows[0].model, tuple(found["shape"]), found["batch"])
        file = _machine_file(options.keep / options.transport, subject)
        if file.exists():
            rows = repriced(rows, subject, Machine.load(file), file.parent)
            path.write_text(json.dumps(found | report(rows, found["refused"]), indent=1))


def weigh(options: argparse.Namespace) -> None:
    """Measure the memory of the rows in the folder that have none, a fresh process each."""
    for path in sorted(options.folder.glob(f"{options.transport}-*.json")):
        found = json.loads(path.read_text())
        rows = [Row(**row) for row in found["rows"]]
        subject = Subject(rows[0].model, tuple(found["shape"]), found["batch"])
        for i, row in enumerate(rows):
            if row.measured_peak_bytes:
                continue
            (sizes,) = measure_memory([Trial(subject, row.plan)], row.ranks, options.transport)
            if isinstance(sizes, str):
                raise RuntimeError(f"{row.model} {row.plan}: {sizes}")
            rows[i] = replace(row, measured_peak_bytes=sizes[0], measured_high_water_bytes=sizes[1])
            path.write_text(json.dumps(found | report(rows, found["refused"]), indent=1))
        print(f"{subject.name}: {100 * report(rows, [])['memory_accuracy']['mean']:.1f} %", flush=True)


def table(folder: Path) -> str:
    """Return all results as text."""
    files = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    lines = ["# Predicted against measured", ""]
    for transport in sorted({f["transport"] for f in files}, reverse=True):
        for unseen in (False, True):
            chosen = [f for f in files if f["transport"] == transport and f["unseen"] == unseen]
            if chosen:
                title = f"{transport}, networks not looked at before" if unseen else transport
                lines += [f"## {title}", "", *_section(chosen)]
    return "\n".join(lines) + "\n"


def _section(files: list[dict[str, Any]]) -> list[str]:
    rows = [row for file in files for row in file["rows"]]
    return [*_summary(rows), "", *_rankings(files), "", *_rows(rows), ""]


def _summary(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| ranks | strategy | time | worst | time, meanwhile | worst | noise of the measurement "
        "| peak memory, worst | RSS, worst |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    groups = sorted({(r["ranks"], r["strategy"]) for r in rows})
    for ranks, strategy in [*groups, (0, "all, 2 and 4 ranks")]:
        mine = [r for r in rows if (r["ranks"], r["strategy"]) == (ranks, strategy)]
        if not ranks:
            mine = [r for r in rows if r["ranks"] <= 4]
        times, later = [_time(r) for r in mine], [_meanwhile(r) for r in mine]
        noise = statistics.fmean(r["measured_spread"] / r["measured_seconds"] for r in mine)
        raw, meanwhile = ((statistics.fmean(column), min(column)) for column in (times, later))
        cells = [*raw, *meanwhile, noise, _worst(mine, "peak"), _worst(mine, "high_water")]
        words = " | ".join("" if cell is None else f"{100 * cell:.1f} %" for cell in cells)
        lines.append(f"| {ranks or ''} | {strategy} | {words} |")
    return lines


def _rankings(files: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| network | ranks | best of these by prediction | slower than the best measured "
        "| best measured is among the best two | chosen by the search | slower than the best measured |",
        "|---|---|---|---|---|---|---|",
    ]
    for file in files:
        # Made anew: files written before do not say all of it.
        for row in report([Row(**r) for r in file["rows"]], [])["ranking"]:
            plan = file.get("searched", {}).get(str(row["ranks"]), "")
            mine = [r for r in file["rows"] if r["ranks"] == row["ranks"]]
            best = min(r["measured_seconds"] for r in mine)
            ours = [f"{100 * (r['measured_seconds'] / best - 1):.1f} %" for r in mine if r["plan"] == plan]
            lines.append(
                f"| {row['model']} | {row['ranks']} | `{row['chosen']}` | {100 * row['slower']:.1f} % "
                f"| {'yes' if row['best_in_top_two'] else 'no'} "
                f"| {f'`{plan}`' if plan else ''} | {''.join(ours)} |"
            )
    return lines


def _rows(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| network | plan | predicted ms | meanwhile ms | measured ms | spread ms | drift | time "
        "| time, meanwhile | peak memory | RSS |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        sizes = [_worst([row], name) for name in ("peak", "high_water")]
        peak, high = ("" if size is None else f"{100 * size:.1f} %" for size in sizes)
        lines.append(
            f"| {row['model']} | `{row['plan']}` | {1e3 * row['predicted_seconds']:.1f} "
            f"| {1e3 * row['meanwhile_seconds']:.1f} | {1e3 * row['measured_seconds']:.1f} "
            f"| {1e3 * row['measured_spread']:.1f} | {100 * row['drift']:.1f} % | {100 * _time(row):.1f} % "
            f"| {100 * _meanwhile(row):.1f} % | {peak} | {high} |"
        )
    return lines


def _worst(rows: list[dict[str, Any]], name: str) -> float | None:
    """Return the least accuracy of a kind of memory, if it was measured at all."""
    pairs = [(r[f"predicted_{name}_bytes"], r[f"measured_{name}_bytes"]) for r in rows]
    return min((accuracy(guess, truth) for guess, truth in pairs if truth), default=None)


def _time(row: dict[str, Any]) -> float:
    return accuracy(row["predicted_seconds"], row["measured_seconds"])


def _meanwhile(row: dict[str, Any]) -> float:
    return accuracy(row["meanwhile_seconds"], row["measured_seconds"])


if __name__ == "__main__":
    main()
