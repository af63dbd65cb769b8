"""Show: what is in a saved run, as text, without opening its artifacts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from murano.artifacts.run import load_run, verify_run
from murano.artifacts.run_manifest import MANIFEST, read_manifest

#: What the numbers of a proof say.
_MEANING = {
    "exact": "whether the logits that were read equal the model's own to the bit",
    "max_difference": "between the two, of one logit",
    "row_difference": "when rows are read one by one",
    "padding_difference": "when tokens are appended",
    "pads": "whether prompts of different lengths share a batch",
    "scale": "the largest logit",
}


def show(path: str | os.PathLike[str], verify: bool = False) -> str:
    """A saved run as text: the model, when, the steps, the proof of the readout, the artifacts and their sizes.

    Args:
        path: the run's folder.
        verify: compare every file with what was saved as well; the last lines then say what is damaged, if anything.

    Raises:
        ArtifactError: it is no run, or its metadata can't be read; the message says what still can.
    """
    run = load_run(path)
    assert run.folder is not None
    about, files = run.metadata, read_manifest(run.folder)
    model = {name: value for name, value in about["model"].items() if value is not None and name != "versions"}
    size = sum(file["bytes"] for file in files.values()) + (run.folder / MANIFEST).stat().st_size
    lines = [
        f"{os.fspath(path)}: saved {about['created']}, {len(files) + 1} files, {_size(size)}",
        _line("model", ", ".join(_pair(name, value) for name, value in model.items()) or "not recorded"),
        _line("packages", ", ".join(f"{name} {version}" for name, version in about["packages"].items())),
        *([_line("git commit", about["git_commit"])] if about["git_commit"] else []),
        *(
            _line("readout" if key == "logit_lens" else f"readout of {key}", _proof(proof))
            for key, proof in about["readout"].items()
        ),
        f"  steps, {about['seconds']:.1f} s in all",
        *(
            f"    {step['call']}  {step['seconds']:.1f} s → {', '.join(step['wrote']) or '—'}"
            for step in about["steps"]
        ),
        "  artifacts",
    ]
    for key, entry in about["artifacts"].items():
        names = entry.get("files", [entry.get("file")])
        lines.append(
            f"    {key:<16} {entry.get('type', 'figures'):<20} {_size(sum(files[n]['bytes'] for n in names)):>9}"
        )
        lines.extend(f"      {name}" for name in names)
    lines.extend(f"    {key:<16} {kind}: left out" for key, kind in about["left_out"].items())
    return "\n".join([*lines, *([str(verify_run(path))] if verify else [])])


def _proof(proof: Mapping[str, Any]) -> str:
    # The tokens it was proved on are in metadata.json: they would bury the rest.
    plain = [_pair(*item) for item in proof.items() if item[0] not in ("prompts", *_MEANING) and item[1] != ""]
    explained = [f"{_pair(name, proof[name])} ({meaning})" for name, meaning in _MEANING.items() if name in proof]
    return f"\n{'':13}".join([*([", ".join(plain)] if plain else []), *explained])


def _line(name: str, text: str) -> str:
    return f"  {name:<10} {text}"


def _pair(name: str, value: Any) -> str:
    shown = f"{value:.3g}" if isinstance(value, float) else str(value)
    return shown if name == "model_id" else f"{name} {shown}"


def _size(n_bytes: int) -> str:
    power = min(len(str(n_bytes)) - 1, 9) // 3
    return f"{n_bytes / 1000**power:.{1 if power else 0}f} {('B', 'kB', 'MB', 'GB')[power]}"
