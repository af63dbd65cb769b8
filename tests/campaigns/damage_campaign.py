"""Damage campaign: damaged, foreign and hostile files, each of which must end in one named error and execute nothing.

    python tests/campaigns/damage_campaign.py --files 2000

A file of a saved run is damaged (cut, bits flipped, blocks overwritten, inserted or removed), replaced by something
foreign (zips, torch files, pickles, text, noise) or by something hostile (pickles that make a canary file when they are
executed, some inside a file with a right seal). It is then opened alone and through its run. Good are an
``ArtifactError`` that names the file, and a load that is equal bit for bit; everything else is wrong. In the end torch
itself gets to see flipped bits under forged seals: there only other exceptions, crashes and execution are wrong. The
last line printed is a JSON report; the exit status is 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import random
import shutil
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

torch.set_num_threads(1)

from samples import small_results  # noqa: E402

from murano.artifacts import store  # noqa: E402
from murano.artifacts.codec import fingerprint  # noqa: E402
from murano.artifacts.run import load_logit_lens, load_prompts, load_run, save_run, verify_run  # noqa: E402
from murano.artifacts.run_items import Value  # noqa: E402
from murano.artifacts.store import load_artifact  # noqa: E402
from murano.errors import ArtifactError  # noqa: E402
from murano.results import Results  # noqa: E402

Damage = Callable[[random.Random, bytes], bytes]


def cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data))]


def flip(rng: random.Random, data: bytes) -> bytes:
    damaged = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def overwrite(rng: random.Random, data: bytes) -> bytes:
    start, size = rng.randrange(len(data)), rng.choice([1, 16, 512])
    block = rng.choice([bytes(size), b"\xff" * size, rng.randbytes(size), data[:size]])
    return (data[:start] + block + data[start + size :])[: len(data)]


def insert(rng: random.Random, data: bytes) -> bytes:
    start = rng.randrange(len(data) + 1)
    return data[:start] + rng.randbytes(rng.choice([1, 2, 64])) + data[start:]


def remove(rng: random.Random, data: bytes) -> bytes:
    start = rng.randrange(len(data))
    return data[:start] + data[start + rng.choice([1, 2, 64]) :]


def foreign(rng: random.Random, data: bytes) -> bytes:
    kind, file = rng.randrange(7), io.BytesIO()
    if kind == 0:
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr(rng.choice(["a.txt", "archive/data.pkl", "logit_lens/data.pkl"]), rng.randbytes(100))
    elif kind == 1:
        torch.save({"weight": torch.zeros(rng.randrange(5))}, file)
    elif kind == 2:
        torch.save([torch.zeros(3)], file, _use_new_zipfile_serialization=False)
    elif kind == 3:
        file.write(rng.randbytes(rng.randrange(300)))
    elif kind == 4:
        file.write(
            rng.choice([b"{}", b"[]", b"null", b'{"murano": "prompts"}', b"[" * 50_000, b"\xef\xbb\xbf{}", b"NaN"])
        )
    elif kind == 5:
        pickle.dump({"top_ids": [1, 2, 3]}, file)
    else:  # a seal that belongs to something else
        file.write(rng.randbytes(500) + data[-80:])
    return file.getvalue()


class Canary:
    """Leaves a folder behind when it is unpickled by something that executes what it reads."""

    def __init__(self, path: Path, how: int) -> None:
        self.path, self.how = str(path), how

    def __reduce__(self) -> Any:
        return [
            (os.mkdir, (self.path,)),
            (eval, (f"__import__('os').mkdir({self.path!r})",)),
            (exec, (f"import os; os.mkdir({self.path!r})",)),
            (getattr, (Path(self.path), "mkdir")),
        ][self.how % 4]


def hostile(canary: Path, rng: random.Random) -> bytes:
    bad, file = Canary(canary, rng.randrange(4)), io.BytesIO()
    envelope = {"murano": "logit_lens", "schema_version": 1, "fields": {"top_ids": bad, "words": {"murano:words": bad}}}
    kind = rng.randrange(5)
    if kind == 0:
        pickle.dump(bad, file, protocol=rng.randrange(6))
    elif kind == 1:
        torch.save(rng.choice([bad, envelope, [bad]]), file)
    elif kind == 2:
        torch.save(envelope, file, _use_new_zipfile_serialization=False)
    elif kind == 3:  # all that a right file has, seal included, and a pickle that executes
        with mock.patch.object(store, "envelope", lambda value: value):
            store.write(file, envelope)
    else:
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(bad))
            archive.writestr("archive/version", "3")
    return file.getvalue()


def reseal(data: bytes) -> bytes:
    """A right seal on a damaged file: what only somebody who means harm would make, and torch gets to see."""
    body = data[:-80]
    return body + store._SEAL + store._sha256(io.BytesIO(body), len(body)).encode()


class Campaign:
    """A run, and what happens when one of its files is replaced."""

    def __init__(self, base: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.canary = base / "canary"
        self.good = save_run(small_results(1), base, "good")
        self.folder = base / "run"
        self.files = sorted(p.relative_to(self.good).as_posix() for p in self.good.rglob("*") if p.is_file())
        self.values = {key: fingerprint(value) for key, value in load_run(self.good).items()}
        self.count: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.executed = 0

    def opens(self, name: str, trial: str, work: Callable[[], Any], expected: Any) -> None:
        """Open a replaced file: an error that names it, or the very same value."""
        try:
            value = work()
        except ArtifactError as error:
            self.count["named errors"] += 1
            if Path(name).name not in str(error):
                self.wrong.append(f"{trial}: the error does not name the file: {error}")
        except BaseException as error:
            self.wrong.append(f"{trial}: {type(error).__name__}: {error}")
        else:
            self.count["forged seals that load" if trial.startswith("resealed") else "equal loads"] += 1
            if expected is not None and fingerprint(value) not in expected:
                self.wrong.append(f"{trial}: another value was accepted")
        if self.canary.exists():
            self.executed += 1
            self.canary.rmdir()

    def all_of(self, run: Results) -> dict[str, Any]:
        """Everything that can still be read of a run; errors of single artifacts are collected."""
        values: dict[str, Any] = {}
        for key in run:
            try:
                values[key] = run[key]
            except ArtifactError as error:
                values[key] = error
        return values

    def unwrapped(self, artifact: Any) -> Any:
        return artifact.value if isinstance(artifact, Value) else artifact

    def trial(self, name: str, data: bytes, kind: str) -> None:
        """Replace one file of the run and open it in every way."""
        trial = f"{kind} {self.count['files']} of {name}"
        self.count["files"] += 1
        self.count[kind] += 1
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.good, self.folder)
        original = (self.folder / name).read_bytes()
        (self.folder / name).write_bytes(data)
        path, everything = self.folder / name, set(self.values.values())
        if name.endswith(".pt"):
            self.opens(name, trial, lambda: self.unwrapped(load_artifact(path)), everything)
        if name.startswith("logit_lens"):
            self.opens(name, trial, lambda: load_logit_lens(path), everything)
        if name.startswith("prompts"):
            self.opens(name, trial, lambda: load_prompts(path), everything)

        def whole() -> Any:
            values = self.all_of(load_run(self.folder))
            errors = [value for value in values.values() if isinstance(value, ArtifactError)]
            others = {key: fingerprint(value) for key, value in values.items() if not isinstance(value, ArtifactError)}
            if any(self.values[key] != value for key, value in others.items()):
                raise ValueError(f"{trial}: the run gave another value")
            if len(others) < len(self.values) - 1:
                raise ValueError(f"{trial}: more was lost than the damaged file: {errors}")
            if errors:
                raise errors[0]
            return None

        self.opens(name, f"{trial}, its run", whole, None)
        check = verify_run(self.folder)
        reformatted = name.endswith(".json") and data != original and check.ok
        if data != original and name not in check.faults and not (reformatted and name == "manifest.json"):
            self.wrong.append(f"{trial}: verify_run does not name it")
        if data != original and len(check.good) < len(self.files) - 1 - (name == "manifest.json"):
            self.wrong.append(f"{trial}: verify_run names good files: {dict(check.faults)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="murano-damage-") as name:
        campaign = Campaign(Path(name), arguments.seed)
        rng = campaign.rng
        damages: tuple[Damage, ...] = (cut, flip, flip, overwrite, insert, remove, foreign)
        for number in range(arguments.files):
            file = rng.choice([*campaign.files, "logit_lens/logit_lens.pt", "logit_lens/logit_lens.pt"])
            data = (campaign.good / file).read_bytes()
            if number % 5 == 4:
                campaign.trial(file, hostile(campaign.canary, rng), "hostile")
            else:
                damage = damages[number % len(damages)]
                campaign.trial(file, damage(rng, data), damage.__name__)
        data = (campaign.good / "logit_lens/logit_lens.pt").read_bytes()
        path = Path(name, "resealed.pt")
        for number in range(arguments.files // 4):
            path.write_bytes(reseal(flip(rng, data)))
            campaign.count["resealed"] += 1
            campaign.opens("resealed.pt", f"resealed {number}", lambda: load_artifact(path), None)
        for how in range(4):  # the canary must be able to sing
            if how != 3:
                pickle.loads(pickle.dumps(Canary(campaign.canary, how)))
                assert campaign.canary.exists()
                campaign.canary.rmdir()
    for line in campaign.wrong[:30]:
        print(line, file=sys.stderr)
    report = {
        **dict(campaign.count),
        "wrong": len(campaign.wrong),
        "executed": campaign.executed,
        "seconds": round(time.perf_counter() - started, 1),
    }
    print(json.dumps(report))
    return 1 if campaign.wrong or campaign.executed else 0


if __name__ == "__main__":
    sys.exit(main())
