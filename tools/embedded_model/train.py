"""Train the embedded model on the synthetic corpus, on a CPU or a GPU.

    python -m tools.embedded_model.train --out DIR --state DIR/state.pt      (the same command again resumes)

Checkpoints are complete Hugging Face folders, DIR/step-N and DIR/final, in float16.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch.nn import functional
from tqdm import tqdm

from hf_fastdecode.assets import BEGIN, DONE

from .data import Packer, build_corpus
from .tokenizer import PAD, train_tokenizer

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

LENGTH: Final = 2048  # tokens of a long training document: about 13 examples
SHORT_LENGTH: Final = 320  # of a short one: about 2 examples, at a third of the cost per token
DECAY: Final = 0.3
LONG_EVERY: Final = 5  # every fifth step has long documents, the others short ones
PROMPT_WEIGHT: Final = 0.15  # loss weight of tokens outside the code: test inputs are random and not worth capacity


@dataclass(frozen=True)
class Settings:
    """Settings that determine the result, besides the hardware's rounding."""

    seed: int = 0
    examples: int = 500_000
    steps: int = 5_000
    tokens_per_step: int = 8_192
    learning_rate: float = 8e-3
    warmup: int = 150
    weight_decay: float = 0.1


def make_model(vocab_size: int, pad: int, eos: int, seed: int) -> LlamaForCausalLM:
    """The untrained model: multi-head attention, head_dim 64, tied embeddings, under 8 MB in 16 bit."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=pad,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def code_weights(rows: torch.Tensor, begin: int, done: int) -> torch.Tensor:
    """Per predicted token ``[rows, length]``: 1 inside ``[BEGIN] ... [DONE]`` (the latter included), else `PROMPT_WEIGHT`."""
    depth = (rows == begin).cumsum(1) - (rows == done).cumsum(1)
    return torch.where(depth[:, :-1] > 0, 1.0, PROMPT_WEIGHT)


def learning_rate(step: int, settings: Settings) -> float:
    """Warm-up, a plateau, and a linear decay to 3 % of the peak over the last `DECAY` of the steps."""
    left = (settings.steps - step) / (DECAY * settings.steps)
    return settings.learning_rate * min(1.0, (step + 1) / settings.warmup, max(0.03, left))


class Trainer:
    """One training run: model, optimizer, rows and the current step."""

    def __init__(
        self, settings: Settings, tokenizer: PreTrainedTokenizerFast, packer: Packer, device: torch.device
    ) -> None:
        self.settings, self.tokenizer, self.packer, self.device = settings, tokenizer, packer, device
        pad, done, begin = tokenizer.convert_tokens_to_ids([PAD, DONE, BEGIN])
        self.done, self.begin = done, begin
        self.model = make_model(len(tokenizer), pad, done, settings.seed).to(device)
        # Muon is for the layers' matrices only; embeddings and norms need an elementwise method.
        inner = [p for p in self.model.model.layers.parameters() if p.ndim == 2]
        matrices = {id(p) for p in inner}
        rest = [p for p in self.model.parameters() if id(p) not in matrices]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(inner, lr=0.0, weight_decay=settings.weight_decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        ]
        self.step = 0

    def compile_layers(self) -> None:
        """Compile each decoder layer; the mask logic around them stays eager, so attention keeps its causal fast path."""
        for layer in self.model.model.layers:
            layer.compile()

    def loss(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The weighted loss of the current step's rows, and the mean loss of their code tokens."""
        length = LENGTH if self.step % LONG_EVERY == LONG_EVERY - 1 else SHORT_LENGTH
        if self.device.type == "cpu":  # the fused operator is made for long rows there
            self.model.set_attn_implementation("sdpa" if length == LENGTH else "eager")
        rows = self.packer.rows(self.step, length)
        weights = code_weights(rows, self.begin, self.done)
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            logits = self.model(input_ids=rows[:, :-1], use_cache=False).logits
        losses = functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten(), reduction="none")
        losses = losses.view_as(weights)
        code = weights == 1.0
        return (losses * weights).sum() / weights.sum(), (losses.detach() * code).sum() / code.sum()

    def advance(self) -> torch.Tensor:
        """One optimizer step; returns the code loss as a device scalar."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(self.step, self.settings)
        loss, code_loss = self.loss()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return code_loss

    def save(self, folder: Path) -> None:
        """Write a float16 checkpoint with tokenizer and generation config, under a temporary name first."""
        from transformers import GenerationConfig

        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        state = {name: value.to(torch.float16).cpu() for name, value in self.model.state_dict().items()}
        model = make_model(len(self.tokenizer), self.model.config.pad_token_id, self.done, self.settings.seed).half()
        model.load_state_dict(state)
        # Without a length, which would come before a caller's max_length.
        model.generation_config = GenerationConfig(eos_token_id=self.done, pad_token_id=self.model.config.pad_token_id)
        model.save_pretrained(partial)
        self.tokenizer.save_pretrained(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)

    def save_state(self, path: Path) -> None:
        """Write what a later call needs to go on from here."""
        partial = path.with_suffix(".partial")
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        state = {"model": self.model.state_dict(), "optimizers": optimizers, "step": self.step}
        torch.save({**state, "settings": asdict(self.settings)}, partial)
        partial.rename(path)

    def load_state(self, path: Path) -> None:
        """Go on from a saved state of the same settings; the number of steps may differ up to where the decay starts."""
        state = torch.load(path, map_location=self.device, weights_only=True)
        written, wanted = dict(state["settings"]), asdict(self.settings)
        if state["step"] < (1 - DECAY) * min(written["steps"], wanted["steps"]):
            written["steps"] = wanted["steps"]  # so far the rate was the same for both
        if written != wanted:
            raise ValueError(
                f"{path} is at step {state['step']} of {written}, which does not fit {wanted}; remove it to start afresh"
            )
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step = state["step"]


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    defaults = Settings()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and log.jsonl")
    parser.add_argument("--tokenizer", type=Path, help="folder with a trained tokenizer; default: train one")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--examples", type=int, default=defaults.examples)
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument(
        "--tokens-per-step", type=int, default=defaults.tokens_per_step, help=f"a multiple of {LENGTH}"
    )
    parser.add_argument("--learning-rate", type=float, default=defaults.learning_rate)
    parser.add_argument("--checkpoints", default="0.25,0.5,0.75", help="fractions of the training at which to save")
    parser.add_argument("--state", type=Path, help="file to resume from, written every --state-every steps")
    parser.add_argument("--state-every", type=int, default=250)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="compile the decoder layers")
    parser.add_argument("--log-every", type=int, default=100)
    args = parser.parse_args()
    if args.tokens_per_step % LENGTH:
        parser.error(f"--tokens-per-step must be a multiple of {LENGTH}, got {args.tokens_per_step}")
    return args


def main() -> None:
    """Generate the corpus, train, save checkpoints."""
    from transformers import AutoTokenizer

    args = parse_arguments()
    device = torch.device(args.device)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer) if args.tokenizer else train_tokenizer(args.seed)
    tokenizer.save_pretrained(args.out / "tokenizer")
    corpus = build_corpus(args.seed, args.examples, args.out / "tokenizer" / "tokenizer.json")
    packer = Packer(corpus, args.seed, device, args.tokens_per_step)
    torch.set_float32_matmul_precision("high")

    settings = Settings(args.seed, args.examples, args.steps, args.tokens_per_step, args.learning_rate)
    trainer = Trainer(settings, tokenizer, packer, device)
    if args.compile:
        trainer.compile_layers()
    steps = args.steps
    if args.state and args.state.exists():
        trainer.load_state(args.state)
    marks = {int(float(part) * steps) for part in args.checkpoints.split(",") if part}
    parameters = sum(p.numel() for p in trainer.model.parameters())
    print(json.dumps({**asdict(settings), "corpus_tokens": packer.total, "parameters": parameters}), flush=True)
    with (
        tqdm(total=steps, initial=trainer.step, unit="step", mininterval=10) as bar,
        (args.out / "log.jsonl").open("a", buffering=1) as log,
    ):
        while trainer.step < steps:
            code_loss = trainer.advance()
            bar.update()
            if trainer.step % args.log_every == 0 or trainer.step == steps:
                value = float(code_loss)
                bar.set_postfix(code_loss=f"{value:.4f}")
                log.write(json.dumps({"step": trainer.step, "code_loss": round(value, 5)}) + "\n")
            if trainer.step in marks or trainer.step == steps:
                trainer.save(args.out / ("final" if trainer.step == steps else f"step-{trainer.step}"))
            if args.state and trainer.step % args.state_every == 0:
                trainer.save_state(args.state)


if __name__ == "__main__":
    main()
