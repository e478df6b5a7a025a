"""transformers' server, through `hf-fastdecode serve`: its answers, with the beginning of each prompt kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress

import pytest
import uvicorn
from starlette.testclient import TestClient
from transformers.cli.serving import model_manager
from transformers.cli.transformers import app

import hf_fastdecode as fd
from hf_fastdecode import api
from hf_fastdecode.cli.programs import run_server
from hf_fastdecode.errors import InputError

from ..ports import free_port
from .programs import Work, save_adapter, saved_model

WORK = Work()
OPTIONS = {"max_tokens": WORK.new_tokens, "temperature": 0.8, "seed": 3}


@pytest.fixture
def folder(tmp_path):
    return str(saved_model(tmp_path))


@pytest.fixture
def loaded(monkeypatch):
    """The models that were enabled."""
    models, enable = [], api.enable

    def remember(model, **options):
        models.append(enable(model, **options))
        return model

    monkeypatch.setattr(api, "enable", remember)
    return models


def conversation():
    """Requests of a chat that grows."""
    messages = []
    for prompt in WORK.prompts:
        messages.append({"role": "user", "content": prompt})
        yield "/v1/chat/completions", {"messages": list(messages), **OPTIONS}
        messages.append({"role": "assistant", "content": "yes"})


def completions():
    """Requests whose prompts begin with the same examples; one is greedy, the last is streamed."""
    for number, prompt in enumerate(WORK.prompts):
        drawn = {**OPTIONS, "temperature": 0.0} if number == 1 else OPTIONS
        yield "/v1/completions", {"prompt": prompt, "stream": number == 2, **drawn}


def answers(monkeypatch, serve, folder, requests, loaded):
    """What a server answers to each request without its ids and times, and what the last call of its model was."""
    found = []

    def run(server):
        client = TestClient(server.config.app)
        for path, body in requests():
            answer = client.post(path, json={"model": folder, **body})
            assert answer.status_code == 200, answer.text
            last = fd.explain(loaded[-1]).last_call if loaded else None
            found.append((text_of(answer, body.get("stream")), last))

    monkeypatch.setattr(uvicorn.Server, "run", run)
    with suppress(SystemExit):  # of transformers' own command line
        serve(["serve", folder, "--device", "cpu"])
    return found


def text_of(answer, streamed):
    if streamed:
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
        return [json.loads(line)["choices"] for line in lines]
    return [answer.json()["choices"], answer.json()["usage"]]


@pytest.mark.parametrize("requests", [conversation, completions])
def test_answers_are_those_of_transformers_serve(requests, folder, loaded, monkeypatch):
    manager = model_manager.ModelManager
    stock = answers(monkeypatch, app, folder, requests, [])
    ours = answers(monkeypatch, lambda words: run_server(words[1:]), folder, requests, loaded)
    assert model_manager.ModelManager is manager
    assert [answer for answer, _ in ours] == [answer for answer, _ in stock]
    assert len({str(answer) for answer, _ in stock}) == WORK.problems
    assert len(loaded) == 1
    _, *later = [call for _, call in ours]
    assert {call.path for _, call in ours} == {"shared"}
    assert all(call.prefilled_tokens < 0.6 * call.padded_length for call in later), later


@pytest.fixture
def asked(monkeypatch):
    """Runs our server with words, and has a function ask it through a client."""

    def serve(words, ask):
        monkeypatch.setattr(uvicorn.Server, "run", lambda server: ask(TestClient(server.config.app)))
        run_server([*words, "--device", "cpu"])

    return serve


def test_the_name_that_was_given_is_the_models_name(asked):
    def ask(client):
        (listed,) = client.get("/v1/models").json()["data"]
        assert listed["id"] == "embedded"
        for name in ({"model": "embedded"}, {}):
            answer = client.post("/v1/completions", json={"prompt": "def f(", "max_tokens": 2, **name})
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == "embedded"

    asked(["embedded"], ask)


def test_no_chat_template_is_the_callers_to_set_right(asked):
    def ask(client):
        messages = [{"role": "user", "content": "hello"}]
        for path, body in (("chat/completions", {"messages": messages}), ("responses", {"input": messages})):
            answer = client.post(f"/v1/{path}", json={"model": "embedded", **body})
            assert answer.status_code == 400, answer.text
            assert "no chat template; ask /v1/completions with a prompt" in answer.json()["detail"]

    asked(["embedded"], ask)


def test_an_adapter_is_served_with_its_base(asked, tmp_path, loaded):
    adapter, base = save_adapter(tmp_path)
    texts = {}

    def ask(client):
        body = {"prompt": WORK.prompts[0], "max_tokens": 6, "temperature": 0.0}
        texts[len(texts)] = client.post("/v1/completions", json=body).json()["choices"][0]["text"]

    for folder in (adapter, base):
        asked([str(folder)], ask)
    assert texts[0] != texts[1]
    assert all(fd.explain(model).last_call.path == "shared" for model in loaded)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("./nosuch", "there is no file or folder ./nosuch"),
        ("embedded --dtype float15", "`dtype` must be one of auto, float32"),
    ],
)
def test_refusals_come_before_the_server(words, message, monkeypatch):
    monkeypatch.setattr(uvicorn.Server, "run", None)
    with pytest.raises(InputError, match=message):
        run_server(words.split())


def test_signals_end_the_server_without_a_word_and_without_a_folder(tmp_path):
    """The embedded model is copied to a folder of the process where the cache cannot be written to."""
    servers = {}
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        port, folder = free_port(), tmp_path / str(code)
        folder.mkdir()
        words = ["env", "--default-signal=INT", sys.executable, "-m", "hf_fastdecode", "serve", "embedded"]
        words += ["--device", "cpu", "--port", str(port)]
        environment = os.environ | {"HF_HOME": "/proc/none", "TMPDIR": str(folder)}
        servers[number] = (
            subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True),
            port,
            folder,
            code,
        )
    for number, (server, port, folder, code) in servers.items():
        while True:
            try:
                urllib.request.urlopen(f"http://localhost:{port}/health", timeout=5).close()
                break
            except OSError:
                assert server.poll() is None, server.stderr.read()
                time.sleep(0.3)
        assert list(folder.glob("hf_fastdecode-embedded-*"))
        server.send_signal(number)
        told = server.communicate(timeout=60)[1]
        assert server.returncode == code, told
        assert "Aborted" not in told and "Traceback" not in told, told
        assert not list(folder.glob("hf_fastdecode-*"))
