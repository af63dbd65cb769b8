"""Libraries that need an environment of their own: each runs in a process that reads requests and answers in JSON."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parent / "peers"
Ids = list[list[int]]


def peers_folder() -> Path:
    """Where ``peers.sh`` makes environments: ``MURANO_PEERS``, or in the user's cache."""
    return Path(os.environ.get("MURANO_PEERS") or Path.home() / ".cache" / "murano" / "peers")


@dataclass
class Peer:
    """One library in its own environment.

    Args:
        label: what it is called in the table.
        script: of the runner, in ``benchmarks/peers``.
        positions: which of ``"all"`` and ``"last"`` it can do.
        python: of its environment.
        model: the folder of the model.
    """

    label: str
    script: str
    positions: tuple[str, ...] = ("all", "last")
    python: Path | None = None
    model: Path | None = None
    process: subprocess.Popen[str] | None = None
    log: Any = None

    def start(self, ids: Ids, positions: str) -> dict[str, Any]:
        """Load its model and warm up; says its versions."""
        # A PYTHONPATH would show it this tree, and one of the peers has a package of the same name.
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by stop
        self.process = subprocess.Popen(
            [str(self.python), str(SCRIPTS / self.script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            cwd=SCRIPTS,
            env=environment,
        )
        return self._ask({"model": str(self.model), "ids": ids, "positions": positions})

    def run(self) -> dict[str, Any]:
        """One run: its seconds and memory."""
        return self._ask({"run": True})

    def memory(self, ids: Ids, positions: str) -> dict[str, Any]:
        """Peak memory of one run in a fresh process."""
        try:
            ready = self.start(ids, positions)
            found = self.run()
        finally:
            self.stop()
        return {
            "loaded": ready["loaded"],
            "kept": found["ready"] - ready["loaded"],
            "peak": found["peak"],
            "how": found["how"],
        }

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.process is not None and self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self.log.seek(0)
            last = (self.log.read().strip().splitlines() or ["no message"])[-1]
            raise RuntimeError(f"{self.label} ended: {last}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def stop(self) -> None:
        """End its process."""
        if self.process is not None:
            assert self.process.stdin is not None and self.process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
            try:
                self.process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process.stdout.close()
            self.log.close()
            self.process = None


PEERS: dict[str, Peer] = {
    "transformer-lens": Peer("TransformerLens", "run_transformer_lens.py"),
    "interp-engine": Peer("interp-engine", "run_interp_engine.py"),
    "murano-interp": Peer("murano-interp of the index", "run_murano_interp.py", ("all",)),
}


def installed_peers(folder: Path | None, model: Path) -> dict[str, Peer]:
    """Those whose environment is there."""
    found = {}
    for name, peer in PEERS.items():
        python = ((folder or peers_folder()) / name / "bin" / "python").absolute()
        if python.exists():
            found[name] = replace(peer, python=python, model=model)
    return found
