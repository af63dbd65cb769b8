"""What the benchmarks share: prompts, memory, the machine, tables."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import gc
import importlib
import importlib.metadata
import inspect
import json
import platform
import re
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs" / "benchmarks.md"
IMAGES = ROOT / "docs" / "images"
RESULTS = ROOT / "benchmarks" / "results"
MB = 1e6

#: Modules of the standard library whose docstrings are the English of the prompts.
TEXTS = """
argparse ast asyncio bisect calendar codecs collections configparser contextlib csv ctypes dataclasses
datetime decimal difflib doctest email enum fractions functools glob gzip heapq html http.client inspect io
itertools json locale logging mailbox multiprocessing operator optparse os pathlib pdb pickle platform queue
random re sched shelve shutil socket sqlite3 ssl statistics string subprocess tarfile tempfile textwrap
threading timeit tokenize traceback turtle types typing unittest urllib.parse urllib.request uuid warnings
weakref xml.dom.minidom zipfile
""".split()  # noqa: SIM905


def english() -> str:
    """Docstrings of the standard library, one after another, none twice."""
    seen: dict[str, None] = {}
    for name in TEXTS:
        try:
            module = importlib.import_module(name)
        except ImportError:  # a Python built without it
            continue
        for item in (module, *(getattr(module, n, None) for n in sorted(getattr(module, "__all__", dir(module))))):
            text = inspect.getdoc(item) if inspect.ismodule(item) or inspect.isclass(item) or callable(item) else None
            if text and len(text) > 80:
                seen[text] = None
    return "\n\n".join(seen)


def token_prompts(tokenizer: Any, prompts: int, length: int) -> list[list[int]]:
    """So many prompts of exactly so many tokens of English."""
    ids = list(tokenizer(english(), add_special_tokens=False)["input_ids"])
    if len(ids) < prompts * length:
        raise ValueError(f"The built-in text has {len(ids)} tokens, {prompts} × {length} were asked for.")
    # From all over the text, so that few prompts are not all of one docstring.
    stride = len(ids) // prompts
    return [ids[i * stride : i * stride + length] for i in range(prompts)]


def parse_case(text: str) -> tuple[int, int]:
    """``"8x128"`` → 8 prompts of 128 tokens."""
    found = re.fullmatch(r"\s*(\d+)\s*[x×]\s*(\d+)\s*", text)
    if found is None or not int(found[1]) or not int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is no case: write prompts x tokens, such as 8x128.")
    return int(found[1]), int(found[2])


def cases_of(text: str) -> list[tuple[int, int]]:
    """``"1x10,8x128"`` → ``[(1, 10), (8, 128)]``."""
    return [parse_case(part) for part in text.split(",")]


# Memory


def settle() -> None:
    """Give freed memory back to the system, so that what is measured next starts from what is in use."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def rss() -> int:
    """Bytes of this process in memory now."""
    return _status("VmRSS")


def peak_rss_of(run: Callable[[], Any]) -> tuple[int, str]:
    """The most bytes of this process in memory while ``run`` runs, and how that was found out."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    except OSError:
        run()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "ru_maxrss (of the whole process)"
    run()
    return _status("VmHWM"), "VmHWM, reset before the run"


# Time


def timed(run: Callable[[], Any]) -> float:
    """Seconds of one run; what it returned is freed after the clock has stopped."""
    gc.collect()
    start = time.perf_counter()
    result = run()
    seconds = time.perf_counter() - start
    del result
    return seconds


def repeats_for(seconds: float, at_least: float = 0.5) -> int:
    """How many runs make one measurement of a fast contender."""
    return max(1, min(50, round(at_least / max(seconds, 1e-4))))


def timed_mean(run: Callable[[], Any], repeats: int) -> float:
    """Seconds of a run, the mean of some in a row."""
    return sum(timed(run) for _ in range(repeats)) / repeats


def median(values: Sequence[float]) -> float:
    """The median."""
    return float(statistics.median(values))


# The machine


def cpu_name() -> str:
    """The processor by name."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    found = re.search(r"model name\s*:\s*(.+)", text)
    family = re.search(r"cpu family\s*:\s*(\d+)[\s\S]*?model\s*:\s*(\d+)", text)
    return (found[1].strip() if found else platform.machine()) + (
        f" (family {family[1]}, model {family[2]})" if family else ""
    )


def machine() -> dict[str, Any]:
    """What a figure depends on: versions, processor, threads."""
    versions = {}
    for package in ("murano-interp", "torch", "transformers", "nnterp", "nnsight", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    import murano

    versions["murano-interp"] = murano.__version__  # the tree that runs, whatever is installed
    return {
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "versions": versions,
        "commit": _commit(),
        "blas": [
            line.strip(" -") for line in torch.__config__.show().splitlines() if "MKL" in line or "BLAS_INFO" in line
        ][:3],
    }


def _commit() -> str:
    import subprocess

    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return found.stdout.strip()


def machine_line(info: dict[str, Any]) -> str:
    """The machine in one line under a table."""
    versions = ", ".join(f"{k} {v}" for k, v in info["versions"].items())
    return f"{info['time'][:10]}, {info['cpu']}, {info['threads']} threads, Python {info['python']}; {versions}."


# What is written


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; the first column to the left, the rest to the right."""
    lines = [list(header), ["---", *["---:"] * (len(header) - 1)], *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    padded = [
        [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))]
        for line in lines
    ]
    padded[1] = ["-" * widths[0], *("-" * (w - 1) + ":" for w in widths[1:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def put_between_markers(file: Path, name: str, text: str) -> None:
    """Replace what stands between ``<!-- name -->`` and ``<!-- /name -->``."""
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    page = file.read_text(encoding="utf-8")
    if page.count(start) != 1 or page.count(end) != 1:
        raise ValueError(f"{file} has not one {start} … {end}.")
    before, rest = page.split(start)
    file.write_text(f"{before}{start}\n\n{text.strip()}\n\n{end}{rest.split(end)[1]}", encoding="utf-8")


class Output:
    """Where a benchmark leaves its JSON, table and plot.

    Args:
        name: of the benchmark: ``"lens"`` makes ``<date>-lens.json``, ``benchmark_lens.png`` and that part of the page.
        folder: everything goes there and the documentation stays as it is; without it into the repository.
        keep: ``False`` prints and writes nothing.
    """

    def __init__(self, name: str, folder: Path | None, keep: bool) -> None:
        self.name, self.folder, self.keep = name, folder, keep

    def write(self, data: dict[str, Any], table: str, draw: Callable[[dict[str, Any], Path], None] | None) -> None:
        """Print the table, and write all three."""
        print(table)
        if not self.keep and self.folder is None:
            print("\n(Nothing written; --out DIR writes.)")
            return
        results = self.folder or RESULTS
        results.mkdir(parents=True, exist_ok=True)
        file = results / f"{data['machine']['time'][:10]}-{self.name}.json"
        file.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        if self.folder is not None:
            (self.folder / f"{self.name}.md").write_text(table + "\n", encoding="utf-8")
        else:
            put_between_markers(DOCS, self.name, table)
        print(f"\nWritten: {file}")
        if draw is not None:
            images = self.folder or IMAGES
            images.mkdir(parents=True, exist_ok=True)
            draw(data, images / f"benchmark_{self.name}.png")
            print(f"Written: {images / f'benchmark_{self.name}.png'}")


def options(description: str) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, to see that it runs; writes nothing without --out"
    )
    parser.add_argument("--out", type=Path, help="write here, and leave the documentation as it is")
    return parser
