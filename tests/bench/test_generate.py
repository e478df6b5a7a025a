"""The bench of generate on the CPU, tiny."""

import pytest
from typer.testing import CliRunner

from hf_fastdecode.bench import generate
from hf_fastdecode.bench.rows import read_rows


def test_rows_of_a_tiny_case():
    rows = list(generate.run([generate.Case("tiny", 120, 4, 8, "float32")], device="cpu", repeats=1))
    stock, shared = rows
    assert (stock["way"], shared["way"]) == ("stock", "shared")
    assert stock["embedded_tokens"] == 4 * (120 + 7)
    assert shared["embedded_tokens"] == 120 + 4 * 7
    per_token = 2 * 2 * 2 * 32 * 4  # K and V, layers, KV heads, head_dim, bytes
    assert shared["kv_bytes"] == shared["floor_kv_bytes"] == (120 + 4 * 8) * per_token
    assert stock["kv_bytes"] == 4 * (120 + 7) * per_token
    assert shared["total_s"] > shared["prefill_s"] > 0


def test_no_row_on_wrong_tokens(monkeypatch):
    monkeypatch.setattr(generate.torch, "equal", lambda *tensors: False)
    with pytest.raises(RuntimeError, match="other tokens than stock on cpu; not measuring"):
        next(generate.run([generate.Case("tiny", 120, 4, 8, "float32")], device="cpu", repeats=1))


def test_out_of_memory_is_a_result(monkeypatch):
    def fail(*args, **kwargs):
        raise generate.torch.OutOfMemoryError("on purpose")

    model = generate.random_model("tiny", "cpu", generate.torch.float32)
    monkeypatch.setattr(model, "generate", fail)
    measured = generate.measure(model, generate.Case("tiny", 120, 4, 8, "float32"), "stock", 1)
    assert measured.status == "out of memory"
    assert measured.total_s is None


def test_command(tmp_path):
    app = generate.typer.Typer()
    app.command()(generate.main)
    out = tmp_path / "rows.csv"
    arguments = ["--shape", "tiny", "--new-tokens", "4", "--dtype", "float32", "--repeats", "1", "--out", str(out)]
    result = CliRunner().invoke(app, [*arguments, "--point", "100x3"])
    assert result.exit_code == 0, result.output
    assert [row["samples"] for row in read_rows(out)] == ["3", "3"]
    result = CliRunner().invoke(app, [*arguments, "--point", "100by3"])
    assert result.exit_code == 2


def test_unknown_shape():
    with pytest.raises(ValueError, match="shape must be one of 7b-mha, 8b-gqa, tiny, got '9b'"):
        generate.random_model("9b", "cpu", generate.torch.float32)
