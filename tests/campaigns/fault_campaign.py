"""Fault campaign: kill, starve and lock out a process that saves runs, and look at what is left.

    python tests/campaigns/fault_campaign.py --kills 300

Kinds of trials, each with the one-step swap of folders and with the two renames of file systems that lack it:

* ``random``: a child saves ever new versions of a run under one name and gets SIGKILL at a random moment;
* ``systematic``: the child kills itself right before the n-th call into the system, for every n until a save ends;
* ``writers``: two processes save under one name while a third reads;
* ``disk``: a file system of a few kilobytes fills up at every possible point (a tmpfs, or a limit on file sizes);
* ``read-only``: the folder can't be written.

After each trial the run must open whole, with all files of one version, no older than the last save that was reported
as done; the next save must go through and leave nothing beside the run. The last line printed is a JSON report; the
exit status is 1 if anything was corrupted or lost.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

torch.set_num_threads(1)

from samples import small_results, versions_in  # noqa: E402

from murano.artifacts import folder as folders  # noqa: E402
from murano.artifacts.folder import is_unfinished  # noqa: E402
from murano.artifacts.run import load_run, save_run, verify_run  # noqa: E402
from murano.errors import ArtifactError  # noqa: E402

#: What a save asks of the system: the moments between these calls are the ones that can differ.
CALLS = (
    "open",
    "write",
    "fsync",
    "close",
    "rename",
    "replace",
    "link",
    "mkdir",
    "rmdir",
    "unlink",
    "ftruncate",
    "pwrite",
)
SIZES = {"layers": 4, "prompts": 3, "positions": 16}


class Campaign:
    """Counts trials and what went wrong in them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.count: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.bad_runs = self.lost_runs = 0

    def check(self, folder: Path, at_least: int, at_most: int, trial: str) -> None:
        """The run in ``folder`` must be whole and of a version that is possible."""
        try:
            versions = versions_in(load_run(folder))
            whole = verify_run(folder).ok
        except ArtifactError as error:
            self.lost_runs += 1
            self.wrong.append(f"{trial}: {error}")
            return
        if len(versions) != 1 or not whole:
            self.bad_runs += 1
            self.wrong.append(f"{trial}: mixed {versions}, whole: {whole}")
        elif not at_least <= min(versions) <= at_most:
            self.lost_runs += 1
            self.wrong.append(f"{trial}: version {versions}, expected {at_least} to {at_most}")

    def check_left(self, parent: Path, name: str, trial: str, *, clean: bool) -> None:
        """Beside the run there may be what is recognisably unfinished, or nothing at all."""
        others = [entry for entry in parent.iterdir() if entry.name != name]
        odd = others if clean else [e for e in others if not is_unfinished(e) and e.name != f".{name}.lock"]
        if odd:
            self.bad_runs += 1
            self.wrong.append(f"{trial}: left behind {[entry.name for entry in odd]}")


def in_child(work: Callable[[], None]) -> int:
    """Run something in a forked child."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(70)
        os._exit(0)
    return pid


def two_renames() -> None:
    folders._exchange = lambda one, other: False


def die_at(call_number: int) -> None:
    """Let this process kill itself right before its n-th call into the system."""
    left = [call_number]

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return called

    for name in CALLS:
        setattr(os, name, wrap(getattr(os, name)))
    folders._exchange = wrap(folders._exchange)
    folders.open = wrap(open)  # type: ignore[attr-defined]
    Path.write_bytes = wrap(Path.write_bytes)  # type: ignore[method-assign]


def random_kills(campaign: Campaign, base: Path, kills: int, patch: Callable[[], None] | None, kind: str) -> None:
    folder = base / f"random-{kind}" / "run"
    save_run(small_results(0, **SIZES), folder.parent, "run")
    version = 0
    started = time.perf_counter()
    for _ in range(5):
        save_run(small_results(0, **SIZES), folder.parent, "run")
    typical = (time.perf_counter() - started) / 5
    for kill in range(kills):
        read_end, write_end = os.pipe()

        def save_for_ever() -> None:
            if patch is not None:
                patch()
            for number in range(version + 1, version + 100_000):  # noqa: B023
                save_run(small_results(number, **SIZES), folder.parent, "run")
                os.write(write_end, number.to_bytes(4, "little"))  # noqa: B023

        pid = in_child(save_for_ever)
        os.close(write_end)
        time.sleep(campaign.random.uniform(0, 4 * typical))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        reported = b""
        while block := os.read(read_end, 1 << 16):
            reported += block
        os.close(read_end)
        done = int.from_bytes(reported[-4:], "little") if reported else version
        trial = f"random kill {kill} ({kind})"
        if not os.WIFSIGNALED(status):
            campaign.wrong.append(f"{trial}: the child ended by itself")
            campaign.lost_runs += 1
        campaign.check_left(folder.parent, "run", trial, clean=False)
        campaign.count["kills, unfinished left"] += any(is_unfinished(entry) for entry in folder.parent.iterdir())
        campaign.check(folder, done, done + 1, trial)
        version = done + 1
        if kill % 3 == 0:  # in the other cases the next child has to cope with what is left
            version += 1
            save_run(small_results(version, **SIZES), folder.parent, "run")
            campaign.check_left(folder.parent, "run", trial, clean=True)
            campaign.check(folder, version, version, trial)
        else:
            version = min(versions_in(load_run(folder)))
        campaign.count["kills"] += 1
        campaign.count[f"kills at random, {kind}"] += 1


def systematic_kills(campaign: Campaign, base: Path, every: int, patch: Callable[[], None] | None, kind: str) -> None:
    for first in (True, False):  # with no earlier run, and over an earlier one with a foreign file in it
        number = 1 + campaign.random.randrange(every)
        while True:
            parent = base / f"systematic-{kind}-{first}-{number}"
            parent.mkdir()
            if not first:
                save_run(small_results(1), parent, "run")
                (parent / "run" / "notes.md").write_text("mine")

            def save() -> None:
                if patch is not None:
                    patch()
                die_at(number)  # noqa: B023
                save_run(small_results(2), parent, "run")  # noqa: B023

            _, status = os.waitpid(in_child(save), 0)
            trial = f"kill before call {number} ({kind}, {'nothing' if first else 'a run'} there)"
            killed = os.WIFSIGNALED(status)
            campaign.count["kills"] += killed
            campaign.count[f"kills before a call, {kind}"] += killed
            campaign.check_left(parent, "run", trial, clean=False)
            if not first or not killed or (parent / "run").exists():
                campaign.check(parent / "run", 2 if not killed else 1, 2, trial)
            if not first and not (parent / "run" / "notes.md").is_file():
                campaign.lost_runs += 1
                campaign.wrong.append(f"{trial}: the foreign file is gone")
            save_run(small_results(3), parent, "run")
            campaign.check(parent / "run", 3, 3, trial)
            campaign.check_left(parent, "run", trial, clean=True)
            shutil.rmtree(parent)
            if not killed:
                break
            number += every


def two_writers(campaign: Campaign, base: Path, seconds: float, patch: Callable[[], None] | None, kind: str) -> None:
    parent = base / f"writers-{kind}"
    save_run(small_results(0, **SIZES), parent, "run")
    until = time.monotonic() + seconds

    def write(first: int) -> Callable[[], None]:
        def work() -> None:
            if patch is not None:
                patch()
            saved = refused = 0
            while time.monotonic() < until:
                try:
                    save_run(small_results(first + saved % 100, **SIZES), parent, "run")
                    saved += 1
                except ArtifactError as error:
                    assert "is being written by" in str(error), error
                    refused += 1
            (base / f"writer-{kind}-{first}").write_text(json.dumps({"saves": saved, "refused": refused}))

        return work

    children = [in_child(write(first)) for first in (1000, 2000)]
    while time.monotonic() < until:
        trial = f"reading beside two writers ({kind})"
        try:
            versions = versions_in(load_run(parent / "run"))
            campaign.count["reads beside writers"] += 1
            if len(versions) != 1:
                campaign.bad_runs += 1
                campaign.wrong.append(f"{trial}: mixed {versions}")
        except ArtifactError as error:
            if "saved again" in str(error) or "There is no" in str(error):
                campaign.count["reads that had to be repeated"] += 1
            else:
                campaign.bad_runs += 1
                campaign.wrong.append(f"{trial}: {error}")
    for child in children:
        _, status = os.waitpid(child, 0)
        if status:
            campaign.bad_runs += 1
            campaign.wrong.append(f"a writer failed ({kind})")
    for first in (1000, 2000):
        counts = json.loads((base / f"writer-{kind}-{first}").read_text())
        campaign.count["saves of two writers"] += counts["saves"]
        campaign.count["refused second writers"] += counts["refused"]
    campaign.check(parent / "run", 1000, 2100, f"two writers ({kind})")
    campaign.check_left(parent, "run", f"two writers ({kind})", clean=True)


@contextlib.contextmanager
def small_disk(base: Path, size: str) -> Iterator[Path | None]:
    """A tmpfs, or nothing where mounting is not allowed."""
    place = base / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    mounted = shutil.which("mount") is not None and subprocess.run(mount, capture_output=True).returncode == 0
    try:
        yield place if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", str(place)], check=False)
        shutil.rmtree(place, ignore_errors=True)


def full_disk(campaign: Campaign, base: Path, patch: Callable[[], None] | None, kind: str) -> None:
    with small_disk(base, "256k") as place:
        if place is None:
            campaign.count["no tmpfs here"] += 1
            limited_files(campaign, base, kind)
            return
        page = os.sysconf("SC_PAGE_SIZE")
        save_run(small_results(1, **SIZES), place, "run")
        free = os.statvfs(place).f_bavail
        for pages in range(free + 1):  # leave so many pages free
            filler = place / "filler"
            filler.write_bytes(bytes((free - pages) * page))

            def save() -> None:
                if patch is not None:
                    patch()
                with contextlib.suppress(ArtifactError):
                    save_run(small_results(2, **SIZES), place, "run")
                    os._exit(9)  # there was room

            _, status = os.waitpid(in_child(save), 0)
            trial = f"disk with {pages} pages free ({kind})"
            filler.unlink()
            if os.waitstatus_to_exitcode(status) not in (0, 9):
                campaign.bad_runs += 1
                campaign.wrong.append(f"{trial}: another exception")
            through = os.waitstatus_to_exitcode(status) == 9
            campaign.count[f"full disks, {kind}"] += not through
            campaign.check(place / "run", 1 + through, 1 + through, trial)
            campaign.check_left(place, "run", trial, clean=True)
            if through:
                break


def limited_files(campaign: Campaign, base: Path, kind: str) -> None:
    """Instead of a full disk: no file may grow beyond so many bytes."""
    parent = base / f"limited-{kind}"
    save_run(small_results(1, **SIZES), parent, "run")
    for limit in range(0, 4000, 100):

        def save() -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))  # noqa: B023
            with contextlib.suppress(ArtifactError):
                save_run(small_results(2, **SIZES), parent, "run")
                os._exit(9)

        _, status = os.waitpid(in_child(save), 0)
        trial = f"files of {limit} bytes at most ({kind})"
        if os.waitstatus_to_exitcode(status) != 0:
            campaign.bad_runs += 1
            campaign.wrong.append(f"{trial}: another exception, or no error")
        campaign.count[f"full disks, {kind}"] += 1
        campaign.check(parent / "run", 1, 1, trial)
        campaign.check_left(parent, "run", trial, clean=True)


def read_only(campaign: Campaign, base: Path) -> None:
    """A folder that can't be written: by its permissions, and by its mount where mounting is allowed."""
    parent = base / "read-only"
    save_run(small_results(1), parent, "run")
    for path in (parent, *parent.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    for outer in (base, *base.parents):
        if outer.stat().st_uid == os.getuid() and outer != Path("/tmp"):
            outer.chmod(outer.stat().st_mode | 0o055)

    def save_as_nobody() -> None:
        if os.getuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        save_in_vain(parent)

    def save_in_vain(place: Path) -> None:
        assert versions_in(load_run(place / "run")) == {1}
        for name in ("run", "new", None):
            try:
                save_run(small_results(2), place, name)
            except ArtifactError as error:
                assert "Can't save" in str(error), error
            else:
                os._exit(9)

    trials = [("permissions", parent, save_as_nobody)]
    with small_disk(base, "256k") as place:
        if place is not None:
            save_run(small_results(1), place, "run")
            subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
            trials.append(("mount", place, lambda: save_in_vain(place)))
        for kind, where, work in trials:
            _, status = os.waitpid(in_child(work), 0)
            if status:
                campaign.bad_runs += 1
                campaign.wrong.append(f"read-only by {kind}: no error, or another one")
            campaign.count["read-only folders"] += 1
            campaign.check(where / "run", 1, 1, f"read-only by {kind}")
            campaign.check_left(where, "run", f"read-only by {kind}", clean=True)
    for path in (parent, *parent.rglob("*")):
        path.chmod(0o755)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300, help="random kills in all")
    parser.add_argument("--every", type=int, default=1, help="kill before every n-th call")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    campaign = Campaign(arguments.seed)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="murano-faults-") as name:
        base = Path(name)
        kinds = (("one step", None), ("two renames", two_renames))
        for kind, patch in kinds:
            random_kills(campaign, base, (arguments.kills + 1) // 2, patch, kind)
            systematic_kills(campaign, base, arguments.every, patch, kind)
            two_writers(campaign, base, 0.5 if arguments.every > 1 else 5, patch, kind)
            full_disk(campaign, base, patch, kind)
        read_only(campaign, base)
    report = {
        **dict(campaign.count),
        "bad_runs": campaign.bad_runs,
        "lost_runs": campaign.lost_runs,
        "seconds": round(time.perf_counter() - started, 1),
    }
    for line in campaign.wrong[:50]:
        print(line, file=sys.stderr)
    print(json.dumps(report))
    return 1 if campaign.bad_runs or campaign.lost_runs else 0


if __name__ == "__main__":
    sys.exit(main())
