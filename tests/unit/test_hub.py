"""Hub ids: one question to the hub, and one error that says what came of it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from murano.errors import ModelError
from murano.model import MuranoModel, loading


class Hub(BaseHTTPRequestHandler):
    """Answers every question with one status, and counts them; 0 is no answer at all."""

    asked: list[str] = []  # noqa: RUF012
    status, code, delay = 404, "", 0.0

    def do_HEAD(self) -> None:
        self.asked.append(self.path)
        time.sleep(self.delay)
        self.send_response(self.status)
        self.send_header("X-Error-Code", self.code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[type[Hub]]:
    """A hub on this machine, and an empty cache."""
    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(huggingface_hub, "hf_hub_url", lambda name, file, revision=None: f"{address}/{name}/{file}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for name, value in (("asked", []), ("status", 404), ("code", ""), ("delay", 0.0)):
        monkeypatch.setattr(Hub, name, value)
    yield Hub
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("status", "code", "reason"),
    [
        (404, "RepoNotFound", "the hub has no model of that name, or a private one."),
        (404, "RevisionNotFound", "it has no revision 'v9' there."),
        (404, "EntryNotFound", "it has no config.json there."),
        (403, "GatedRepo", "it is gated, so accept its terms"),
    ],
)
def test_what_the_hub_answers(hub: type[Hub], status: int, code: str, reason: str) -> None:
    hub.status, hub.code = status, code
    with pytest.raises(ModelError, match="'no-such/model' is no folder here, is not in the hub's cache") as caught:
        MuranoModel("no-such/model", revision="v9")
    assert f"can't be fetched from the hub: {reason}" in str(caught.value)
    assert hub.asked == ["/no-such/model/config.json"]


def test_a_hub_that_does_not_answer(
    hub: type[Hub], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.delay = 1.5
    monkeypatch.setattr(loading, "HUB_TIMEOUT", 0.2)
    before = huggingface_hub.utils.logging.get_verbosity(), logging.getLogger("huggingface_hub").propagate
    started = time.perf_counter()
    with pytest.raises(ModelError, match="can't be fetched from the hub: ReadTimeout"):
        MuranoModel("no-such/model")
    assert time.perf_counter() - started < 1.4
    assert len(hub.asked) == 1
    assert caplog.messages == []
    assert capfd.readouterr().err == ""
    assert (huggingface_hub.utils.logging.get_verbosity(), logging.getLogger("huggingface_hub").propagate) == before


def test_a_hub_that_is_not_there(hub: type[Hub], monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setattr(huggingface_hub, "hf_hub_url", lambda *_, **__: "http://127.0.0.1:9/x")
    started = time.perf_counter()
    with pytest.raises(
        ModelError, match=r"can't be fetched from the hub: ConnectError: .*[^.]\. Check the name"
    ) as caught:
        MuranoModel("no-such/model")
    assert "\n" not in str(caught.value)
    assert time.perf_counter() - started < 2
    assert capfd.readouterr().err == ""


def test_offline_mode_asks_nobody_and_names_a_cached_neighbour(
    hub: type[Hub], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "models--some--model").mkdir()
    with pytest.raises(ModelError, match=r"OfflineModeIsEnabled.* Did you mean 'some/model'\?"):
        MuranoModel("some/modle")
    assert hub.asked == []
