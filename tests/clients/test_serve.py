"""transformers' server, through `hf-fastdecode serve`: its answers, with the beginning of each prompt kept."""

from __future__ import annotations

import json

import pytest
import uvicorn
from starlette.testclient import TestClient
from transformers.cli.serving import model_manager
from transformers.cli.transformers import app

import hf_fastdecode as fd
from hf_fastdecode import api
from hf_fastdecode.cli.programs import run_server

from .programs import Work, saved_model

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
    with pytest.raises(SystemExit) as end:
        serve(["serve", folder, "--device", "cpu"])
    assert end.value.code == 0
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
