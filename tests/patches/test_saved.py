"""Checkpoints on disk name modules and classes of this package: what an earlier commit wrote still loads.

`saved` holds config.json and modeling_slim.py of each family, as the package first wrote them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ..cases import exhaustive_but
from ..fresh_processes import run_fresh

SAVED = Path(__file__).parent / "saved"

LOAD = """
import json, os, sys
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin  # most of what all of them import

auto = {"slim_t5": "AutoModelForSeq2SeqLM", "slim_bart": "AutoModelForSeq2SeqLM",
        "slim_whisper": "AutoModelForSpeechSeq2Seq"}
for folder in sys.argv[1:]:
    if os.fork():  # each without what the others have imported of this package
        os.wait()
        continue
    assert not [name for name in sys.modules if name.startswith("hf_fastdecode")]
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    kind = getattr(transformers, auto.get(config.model_type, "AutoModelForCausalLM"))
    model = kind.from_config(config, trust_remote_code=True)
    print(json.dumps([os.path.basename(folder), type(model).__name__, type(model).__module__]), flush=True)
    os._exit(0)
"""


@pytest.mark.parametrize("names", exhaustive_but(["llama t5 whisper"], ["llama t5 whisper", "*"]))
def test_checkpoints_load_without_the_import(names: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [SAVED / f"slim_{name}" for name in names.split()] if names != "*" else sorted(SAVED.glob("slim_*"))
    assert len(folders) == (15 if names == "*" else 3)
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path))
    done = run_fresh(LOAD, *map(str, folders))
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert [name for name, _, _ in found] == [path.name for path in folders], done.stderr
    for name, kind, module in found:
        config = json.loads((SAVED / name / "config.json").read_text())
        assert (kind, module) == (config["architectures"][0], f"hf_fastdecode.patches.architectures.{name}")
