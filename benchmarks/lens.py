"""Speed and memory of the lens beside the bare matrix product and other libraries: ``python -m benchmarks.lens``.

Times are medians of alternating rounds in one process in which everybody shares one model, so that a machine that
gets slower gets slower for all; ratios are taken within a round. Peak memory is that of a fresh process for each
contender and case.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from benchmarks.contenders import CONTENDERS, Run, model_in_float32
from benchmarks.peers_client import PEERS, Peer, installed_peers
from murano.lens import MAX_CHUNK_BYTES
from murano.tiles import plan

#: Cases with more tokens than this get half the rounds: one of them takes minutes.
MANY_TOKENS = 4096
#: Whom everybody is compared with.
BASES = ("bare", "forward")


def order_of(names: list[str], round_: int) -> list[str]:
    """Everybody once, starting with another one each round."""
    cut = round_ % len(names)
    return names[cut:] + names[:cut]


def measure_times(
    model: Any, case: tuple[int, int], positions: str, names: list[str], peers: dict[str, Peer], rounds: int
) -> tuple[dict[str, list[float]], dict[str, str], dict[str, dict[str, Any]]]:
    """Seconds of every round by contender, what failed, and what the peers' own processes say of themselves."""
    ids = common.token_prompts(model.tokenizer, *case)
    runs: dict[str, Run] = {}
    failed: dict[str, str] = {}
    said: dict[str, dict[str, Any]] = {}
    # A module that another library has put hooks on is no longer the one the others are measured on.
    own = model_in_float32() if any(CONTENDERS[n].own_model for n in names) else model
    for name in names:
        contender = CONTENDERS[name]
        try:
            runs[name] = contender.make(own if contender.own_model else model, ids, positions)
            contender.make(own if contender.own_model else model, [i[:4] for i in ids[:1]], positions)()
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
            runs.pop(name, None)
    try:
        for name, peer in peers.items():
            try:
                said[name] = peer.start(ids, positions)
                runs[name] = peer.run
            except Exception as error:
                failed[name] = f"{type(error).__name__}: {error}"
        # The first round is not counted: it warms up, and says how often a fast one is repeated. Long ones need neither.
        repeats = dict.fromkeys(runs, 1)
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        first = 0 if case[0] * case[1] > MANY_TOKENS else -1
        for round_ in range(first, rounds):
            for name in order_of(list(runs), max(round_, 0)):
                try:
                    took = _seconds(runs[name], repeats[name], name in peers)
                except Exception as error:
                    failed[name] = f"{type(error).__name__}: {error}"
                    del runs[name], seconds[name]
                    continue
                if round_ < 0:
                    repeats[name] = common.repeats_for(took)
                else:
                    seconds[name].append(took)
            print(f"  {case[0]}×{case[1]} {positions}: round {round_ + 1} of {rounds}", file=sys.stderr, flush=True)
    finally:
        for peer in peers.values():
            peer.stop()
    return seconds, failed, said


def _seconds(run: Run, repeats: int, says_itself: bool) -> float:
    if says_itself:  # a peer's process times its own runs
        return float(sum(run()["seconds"] for _ in range(repeats)) / repeats)
    return common.timed_mean(run, repeats)


def measure_memory_here(name: str, case: tuple[int, int], positions: str) -> dict[str, Any]:
    """Peak memory of one contender, in this process, which must be fresh."""
    model = model_in_float32()
    contender = CONTENDERS[name]
    ids = common.token_prompts(model.tokenizer, *case)
    tiny = [i[:4] for i in ids[:1]]
    CONTENDERS["forward"].make(model, tiny, "last")()  # touches every weight
    common.settle()
    loaded = common.rss()
    contender.make(model, tiny, positions)()
    run = contender.make(model, ids, positions)
    common.settle()
    ready = common.rss()
    peak, how = common.peak_rss_of(run)
    return {"loaded": loaded, "kept": ready - loaded, "peak": peak - ready, "how": how}


def measure_memory(name: str, case: tuple[int, int], positions: str) -> dict[str, Any]:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.lens", "--memory-of", name, f"{case[0]}x{case[1]}", positions]
    done = subprocess.run(command, cwd=common.ROOT, capture_output=True, text=True, env=_environment())
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return {"failed": f"exit status {done.returncode}: {last}"}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(common.ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path}


def measure_case(
    model: Any, case: tuple[int, int], positions: str, peers: dict[str, Peer], rounds: int, memory: bool
) -> dict[str, Any]:
    """One case: the rows of one table."""
    names = [n for n, c in CONTENDERS.items() if positions in c.positions]
    mine = {n: p for n, p in peers.items() if positions in p.positions}
    if case[0] * case[1] > MANY_TOKENS:
        rounds = (rounds + 1) // 2
    seconds, failed, said = measure_times(model, case, positions, names, mine, rounds)
    rows: dict[str, Any] = {}
    for name, values in seconds.items():
        row: dict[str, Any] = {
            "label": CONTENDERS[name].label if name in CONTENDERS else PEERS[name].label,
            "seconds": values,
            "median": common.median(values),
        }
        for base in BASES:
            if base in seconds:
                row[f"to_{base}"] = common.median([a / b for a, b in zip(values, seconds[base], strict=True)])
        if name in said:
            row["versions"] = said[name].get("versions", {})
        if memory:
            if name in mine:
                try:
                    row["memory"] = mine[name].memory(common.token_prompts(model.tokenizer, *case), positions)
                except Exception as error:
                    row["memory"] = {"failed": f"{type(error).__name__}: {error}"}
            else:
                row["memory"] = measure_memory(name, case, positions)
        rows[name] = row
    return {
        "prompts": case[0],
        "tokens": case[1],
        "positions": positions,
        "rounds": rounds,
        "rows": rows,
        "failed": failed,
    }


def table_of(data: dict[str, Any]) -> str:
    """All cases as Markdown."""
    parts = []
    for case in data["cases"]:
        what = "all positions" if case["positions"] == "all" else "last position only"
        title = f"### {case['prompts']} × {case['tokens']} tokens, {what}"
        rows = [_table_row(row) for row in sorted(case["rows"].values(), key=lambda r: r["median"])]
        header = ["", "seconds", "min – max", "× bare product", "× plain forward", "peak MB", "kept MB"]
        text = f"{title}\n\n{common.markdown_table(header, rows)}\n\n"
        counts = sorted({len(row["seconds"]) for row in case["rows"].values()})
        text += f"Median of {' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} round{'s' if counts[-1] > 1 else ''}."
        for name, error in case["failed"].items():
            text += f" Not measured: {name} ({' … '.join([error.splitlines()[0], *error.splitlines()[-1:]]):.200})."
        parts.append(text)
    notes = [common.machine_line(data["machine"])]
    if data["product"]:
        notes.append(f"Murano's product here: {data['product']}.")
    others = {r["label"]: r["versions"] for c in data["cases"] for r in c["rows"].values() if "versions" in r}
    for label, versions in others.items():
        notes.append(f"{label}: {', '.join(f'{k} {v}' for k, v in versions.items())}.")
    if data["peers_missing"]:
        notes.append(f"Not installed: {', '.join(data['peers_missing'])}.")
    return "\n\n".join([*parts, *notes])


def _table_row(row: dict[str, Any]) -> list[str]:
    memory = row.get("memory", {})
    return [
        row["label"],
        f"{row['median']:.3g}",
        f"{min(row['seconds']):.3g} – {max(row['seconds']):.3g}",
        f"{row['to_bare']:.2f}" if "to_bare" in row else "",
        f"{row['to_forward']:.2f}" if "to_forward" in row else "",
        f"{memory['peak'] / common.MB:.0f}" if "peak" in memory else ("failed" if memory else ""),
        f"{memory['kept'] / common.MB:.0f}" if "kept" in memory else "",
    ]


def draw(data: dict[str, Any], file: Path) -> None:
    """Time and peak memory, a row of bars for each case."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cases = data["cases"]
    sizes = [len(c["rows"]) for c in cases]
    figure = Figure(figsize=(11, 0.8 * len(cases) + 0.28 * sum(sizes)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(cases), 2, squeeze=False, gridspec_kw={"height_ratios": [s + 1 for s in sizes]})
    for (left, right), case in zip(axes, cases, strict=True):
        rows = sorted(case["rows"].values(), key=lambda r: -r["median"])
        labels = [r["label"] for r in rows]
        colors = ["#c44e52" if r["label"].startswith("Murano,") else "#4c72b0" for r in rows]
        bars = left.barh(labels, [r["median"] for r in rows], color=colors)
        left.bar_label(bars, [f"{r['median']:.3g} s" for r in rows], padding=2, fontsize=7)
        left.set_title(f"{case['prompts']} × {case['tokens']} tokens, {case['positions']}", fontsize=9, loc="left")
        peaks = [r.get("memory", {}).get("peak", 0) / common.MB for r in rows]
        bars = right.barh(labels, peaks, color=colors)
        right.bar_label(bars, [f"{p:.0f} MB" if p else "" for p in peaks], padding=2, fontsize=7)
        right.set_yticks([])
        if max(peaks, default=0) > 200:
            right.set_xscale("symlog", linthresh=100)
        for axis in (left, right):
            axis.margins(x=0.15)
            axis.tick_params(labelsize=7)
            axis.spines[["top", "right"]].set_visible(False)
        if not any(peaks):  # memory was not measured
            right.set_axis_off()
    axes[-1][0].set_xlabel("seconds (median)", fontsize=8)
    axes[-1][1].set_xlabel("peak memory above the loaded model, MB", fontsize=8)
    figure.savefig(file, dpi=130)


def chosen_product(model: Any) -> str:
    """Which product Murano chose on this machine, where it says so."""
    tiles = plan(torch.empty(1, model.vocab_size), 5, MAX_CHUNK_BYTES)
    assert tiles is not None
    choice = model.product(tiles[0], "auto", tiles[1])
    speeds = ", ".join(f"{name} {gflops:.0f}" for name, gflops in choice.gflops.items())
    return f"{choice.name} (GFLOP/s on the unembedding: {speeds})"


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Results of several runs as one: a row that was measured twice is taken from the later run, its ratios with it.

    Memory stays of the earlier one where the later did not measure it.
    """
    cases: dict[tuple[int, int, str], dict[str, Any]] = {}
    for part in parts:
        for case in part["cases"]:
            key = (case["prompts"], case["tokens"], case["positions"])
            earlier = cases.get(key, case)["rows"]
            memory = {name: {"memory": row["memory"]} for name, row in earlier.items() if "memory" in row}
            rows = {**earlier, **{name: memory.get(name, {}) | row for name, row in case["rows"].items()}}
            rows = {name: row for name, row in rows.items() if name in CONTENDERS or name in PEERS}
            failed = {**cases.get(key, case)["failed"], **case["failed"]}
            failed = {name: why for name, why in failed.items() if name not in rows}
            cases[key] = {**case, "rows": rows, "failed": failed}
    alike = [{k: v for k, v in part["machine"].items() if k not in ("time", "commit")} for part in parts]
    if any(machine != alike[0] for machine in alike):
        raise SystemExit("These results are from different machines or versions.")
    return {**parts[-1], "cases": [cases[key] for key in sorted(cases, key=lambda k: (k[0] * k[1], k[2]))]}


def main() -> None:
    """Measure everything and write it down."""
    if sys.argv[1:2] == ["--memory-of"]:
        name, case, positions = sys.argv[2:5]
        print(json.dumps(measure_memory_here(name, common.parse_case(case), positions)))
        return
    parser = common.options(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=5, help=f"half of them for more than {MANY_TOKENS} tokens")
    parser.add_argument("--cases", type=common.cases_of, default="1x10,8x128,64x128", help="prompts x tokens")
    parser.add_argument("--positions", choices=["all", "last", "both"], default="both")
    parser.add_argument("--only", help="these contenders, by comma: " + ", ".join([*CONTENDERS, *PEERS]))
    parser.add_argument("--no-memory", action="store_true", help="times only")
    parser.add_argument(
        "--peers", type=Path, help="where benchmarks/peers.sh made environments; MURANO_PEERS otherwise"
    )
    parser.add_argument(
        "--join", type=Path, nargs="+", metavar="JSON", help="measure nothing: write the tables of these results as one"
    )
    parser.add_argument("--name", default="lens", help="of the results, and of the part of the page that they go to")
    asked = parser.parse_args()
    if asked.join:
        data = joined([json.loads(file.read_text(encoding="utf-8")) for file in asked.join])
        common.Output(asked.name, asked.out, keep=True).write(data, table_of(data), draw)
        return
    if asked.rounds < 1:
        parser.error("--rounds must be at least 1")
    if asked.quick:
        asked.rounds, asked.cases = min(asked.rounds, 2), [(1, 10)]
    model = model_in_float32()
    peers = installed_peers(asked.peers, Path(str(model.hf_model.name_or_path)))
    installed = set(peers)
    if asked.only:
        wanted = set(asked.only.split(","))
        unknown = wanted - {*CONTENDERS, *PEERS}
        if unknown:
            parser.error(f"--only: unknown {', '.join(sorted(unknown))}")
        for name in list(CONTENDERS):
            if name not in wanted:
                # "forward" stays for the memory of others, which is measured in other processes anyway.
                del CONTENDERS[name]
        peers = {n: p for n, p in peers.items() if n in wanted}
    data = {"benchmark": "lens", "machine": common.machine(), "cases": []}
    for case in asked.cases:
        for positions in ("all", "last") if asked.positions == "both" else (asked.positions,):
            data["cases"].append(measure_case(model, case, positions, peers, asked.rounds, not asked.no_memory))
    data["product"] = chosen_product(model)
    data["peers_missing"] = [p.label for n, p in PEERS.items() if n not in installed]
    output = common.Output(asked.name, asked.out, keep=not asked.quick)
    output.write(data, table_of(data), draw)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
