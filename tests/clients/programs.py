"""Programs that load a model by name and call its `generate`: how each loads it, where it is, how each is asked."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import sleep
from typing import Any

import torch
from transformers import PreTrainedModel, set_seed

import hf_fastdecode as fd
from hf_fastdecode.assets import SEPARATOR, embedded_tasks, few_shot_prompt

from ..ports import free_port
from .recording import Calls, recorded

PLAIN_CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
PATTERN = r"(def [a-z]{3,40}\(\)|[a-z]{5,30} [0-9]{1,9})"


@dataclass(frozen=True)
class Work:
    """What a program is asked.

    Attributes:
        problems: Prompts: few-shot prompts of the embedded tasks, which begin alike.
        shots: Solved examples in front of each.
        samples: Of each prompt, where the program draws several.
        new_tokens: Most tokens of a sample.
    """

    problems: int = 3
    shots: int = 2
    samples: int = 4
    new_tokens: int = 12

    @property
    def prompts(self) -> list[str]:
        """The prompts as text."""
        return [few_shot_prompt(task, self.shots) for task in embedded_tasks()[: self.problems]]


@dataclass(frozen=True)
class Program:
    """A program, used through its own public names.

    Attributes:
        load: Makes it from a folder that holds a model and its tokenizer.
        model: Where its model is.
        ask: Has it generate; returns what it returned, as text or tokens.
        options: Of `fd.enable`: `reuse_prefix` where it sends one prompt at a time.
    """

    load: Callable[[Path, Work], Any]
    model: Callable[[Any], PreTrainedModel]
    ask: Callable[[Any, Work], list[Any]]
    options: dict[str, Any] = field(default_factory=dict)


def run(name: str, work: Work, *, enable: bool) -> tuple[list[Any], Calls]:
    """Load a program of `PROGRAMS`, enable its model or not, and ask it; seeded.

    Returns:
        What the program returned, and its calls.
    """
    program = PROGRAMS[name]
    # lighteval turns gradients off for the rest of the process; the context turns them on again.
    with torch.enable_grad(), tempfile.TemporaryDirectory() as folder:
        loaded = program.load(saved_model(Path(folder)), work)
        model = program.model(loaded)
        if enable:
            fd.enable(model, **program.options)
        set_seed(0)
        with recorded(model) as calls:
            return program.ask(loaded, work), calls


def saved_model(folder: Path) -> Path:
    """The embedded model in a folder of its own, with a chat template and an instruct model's generation config."""
    model, tokenizer = fd.load_embedded()
    tokenizer.chat_template = PLAIN_CHAT
    model.generation_config.max_new_tokens, model.generation_config.do_sample = None, True
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder / "model"


def save_adapter(folder: Path) -> tuple[Path, Path]:
    """Folders of a LoRA adapter without a tokenizer, which changes what its model says, and of that model."""
    from peft import LoraConfig, get_peft_model

    base = saved_model(folder)
    torch.manual_seed(0)
    model = get_peft_model(
        fd.load_embedded()[0], LoraConfig(target_modules=["o_proj", "v_proj"], init_lora_weights=False)
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=4)
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(folder / "adapter")
    return folder / "adapter", base


def _chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _lighteval(folder: Path, work: Work) -> Any:
    from lighteval.models.model_input import GenerationParameters
    from lighteval.models.transformers.transformers_model import TransformersModel, TransformersModelConfig

    return TransformersModel(
        TransformersModelConfig(
            model_name=str(folder),
            dtype="float32",
            device="cpu",
            batch_size=work.problems,
            max_length=2048,
            generation_parameters=GenerationParameters(temperature=0.8, top_p=0.95),
            cache_dir=str(folder.parent / "cache"),
        )
    )


def _ask_lighteval(lm: Any, work: Work) -> list[Any]:
    from lighteval.tasks.requests import Doc, SamplingMethod

    docs = [
        Doc(
            query=prompt,
            choices=[""],
            gold_index=0,
            id=str(number),
            task_name="embedded|0",
            num_samples=work.samples,
            generation_size=work.new_tokens,
            stop_sequences=[SEPARATOR],
            sampling_methods=[SamplingMethod.GENERATIVE],
        )
        for number, prompt in enumerate(work.prompts)
    ]
    return [response.text for response in lm.greedy_until(docs)]


def _inspect(folder: Path, work: Work) -> Any:
    from inspect_ai.model import get_model

    return get_model("hf/embedded", model_path=str(folder), device="cpu", do_sample=False, memoize=False)


def _ask_inspect(model: Any, work: Work) -> list[Any]:
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.model import GenerateConfig

    task = Task(
        dataset=[Sample(input=prompt, id=number) for number, prompt in enumerate(work.prompts)],
        config=GenerateConfig(max_tokens=work.new_tokens, max_connections=work.problems * work.samples),
        epochs=work.samples,
    )
    with tempfile.TemporaryDirectory() as logs:
        (log,) = eval(task, model=model, display="none", log_dir=logs)
        if log.status != "success":
            raise RuntimeError(log.error.message)
        return [sample.output.completion for sample in sorted(log.samples, key=lambda one: (one.id, one.epoch))]


def _langchain(folder: Path, work: Work) -> Any:
    from langchain_huggingface import HuggingFacePipeline

    options = {"max_new_tokens": work.new_tokens, "do_sample": False, "return_full_text": False}
    return HuggingFacePipeline.from_model_id(str(folder), "text-generation", pipeline_kwargs=options)


def _llama_index(folder: Path, work: Work) -> Any:
    from llama_index.llms.huggingface import HuggingFaceLLM

    return HuggingFaceLLM(
        model_name=str(folder),
        tokenizer_name=str(folder),
        context_window=2048,
        device_map="cpu",
        max_new_tokens=work.new_tokens,
        generate_kwargs={"do_sample": False},
        tokenizer_outputs_to_remove=["token_type_ids"],
    )


def _smolagents(folder: Path, work: Work) -> Any:
    from smolagents import TransformersModel

    return TransformersModel(model_id=str(folder), device_map="cpu", max_new_tokens=work.new_tokens)


def _ask_smolagents(model: Any, work: Work) -> list[Any]:
    """A conversation that grows by each question and answer, as that of an agent does."""
    messages, answers = [], []
    for question in _conversation(work):
        messages.append({"role": "user", "content": [{"type": "text", "text": question}]})
        answers.append(model.generate(messages).content)
        messages.append({"role": "assistant", "content": [{"type": "text", "text": answers[-1]}]})
    return answers


def _conversation(work: Work) -> list[str]:
    """Questions of which the first brings the solved examples."""
    return [work.prompts[0], *(few_shot_prompt(task, 0) for task in embedded_tasks()[1 : work.problems])]


def _serve(folder: Path, work: Work) -> Any:
    from transformers.cli.serve import Serve

    return Serve(force_model=str(folder), device="cpu", port=free_port(), non_blocking=True)


def _model_of_serve(server: Any) -> PreTrainedModel:
    (loaded,) = server._model_manager.loaded_models.values()
    return loaded.model


def _ask_serve(server: Any, work: Work) -> list[Any]:
    """The same conversation over HTTP."""
    from openai import OpenAI

    while not server.server.started:
        sleep(0.01)
    client = OpenAI(base_url=f"http://localhost:{server.server.config.port}/v1", api_key="none")
    name, messages, answers = server._model_manager.force_model, [], []
    try:
        for question in _conversation(work):
            messages.append({"role": "user", "content": question})
            answer = client.chat.completions.create(model=name, messages=messages, max_tokens=work.new_tokens, seed=0)
            answers.append(answer.choices[0].message.content)
            messages.append({"role": "assistant", "content": answers[-1]})
    finally:
        server.kill_server()
    return answers


def _distilabel(folder: Path, work: Work) -> Any:
    from distilabel.models import TransformersLLM

    llm = TransformersLLM(model=str(folder))
    llm.load()
    return llm


def _ask_distilabel(llm: Any, work: Work) -> list[Any]:
    options = {"num_generations": work.samples, "max_new_tokens": work.new_tokens, "temperature": 0.8}
    outputs = llm.generate_outputs(inputs=[_chat(prompt) for prompt in work.prompts], **options)
    return [output["generations"] for output in outputs]


def _verl(folder: Path, work: Work) -> Any:
    from omegaconf import OmegaConf
    from transformers import AutoModelForCausalLM
    from verl.workers.rollout.hf_rollout import HFRollout

    class Rollout(HFRollout):
        """`HFRollout` of verl 0.9 cannot be made: its base class takes more arguments, and has abstract methods."""

        def __init__(self, module: PreTrainedModel, config: Any) -> None:
            self.config, self.module = config, module

        async def resume(self, tags: list[str]) -> None: ...

        async def update_weights(self, weights: Any, **kwargs: Any) -> None: ...

        async def release(self) -> None: ...

    sampling = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    config = OmegaConf.create({**sampling, "response_length": work.new_tokens})
    return Rollout(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), config)


def _ask_verl(rollout: Any, work: Work) -> list[Any]:
    from verl import DataProto

    _, tokenizer = fd.load_embedded()
    rows = [prompt for prompt in work.prompts for _ in range(work.samples)]  # as verl's trainer repeats them
    batch = tokenizer(rows, return_tensors="pt", padding=True, return_token_type_ids=False)
    positions = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    prompts = DataProto.from_dict({**batch, "position_ids": positions}, meta_info=ends)
    return rollout.generate_sequences(prompts).batch["responses"].tolist()


def _transformers(folder: Path, work: Work) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def _constrained(model: Any, work: Work, processors: Callable[[Any, Any], dict[str, Any]]) -> list[Any]:
    """Samples of each prompt under a grammar, which ends rows at different steps."""
    _, tokenizer = fd.load_embedded()
    texts = []
    for prompt in work.prompts:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        outputs = model.generate(
            **inputs,
            **processors(model, tokenizer),
            do_sample=True,
            top_k=0,
            num_return_sequences=work.samples,
            max_new_tokens=work.new_tokens,
        )
        texts.append(tokenizer.batch_decode(outputs[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    return texts


def _xgrammar(model: Any, tokenizer: Any) -> dict[str, Any]:
    import xgrammar

    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=model.config.vocab_size)
    grammar = xgrammar.GrammarCompiler(info).compile_regex(PATTERN)
    return {"logits_processor": [xgrammar.contrib.hf.LogitsProcessor(grammar)]}


def _format_enforcer(model: Any, tokenizer: Any) -> dict[str, Any]:
    import transformers
    from lmformatenforcer import RegexParser

    # lm-format-enforcer imports the class from a module where transformers 5 no longer has it.
    transformers.tokenization_utils.PreTrainedTokenizerBase = transformers.PreTrainedTokenizerBase
    from lmformatenforcer.integrations.transformers import build_transformers_prefix_allowed_tokens_fn

    return {"prefix_allowed_tokens_fn": build_transformers_prefix_allowed_tokens_fn(tokenizer, RegexParser(PATTERN))}


REUSE = {"reuse_prefix": True}
PROGRAMS = {
    "lighteval": Program(_lighteval, lambda lm: lm.model, _ask_lighteval),
    "inspect_ai": Program(_inspect, lambda model: model.api.model, _ask_inspect),
    "langchain-huggingface": Program(
        _langchain, lambda llm: llm.pipeline.model, lambda llm, work: [llm.invoke(one) for one in work.prompts], REUSE
    ),
    "llama-index": Program(
        _llama_index, lambda llm: llm._model, lambda llm, work: [llm.complete(one).text for one in work.prompts], REUSE
    ),
    "smolagents": Program(_smolagents, lambda model: model.model, _ask_smolagents, REUSE),
    "transformers serve": Program(_serve, _model_of_serve, _ask_serve, REUSE),
    "distilabel": Program(_distilabel, lambda llm: llm._pipeline.model, _ask_distilabel),
    "verl HFRollout": Program(_verl, lambda rollout: rollout.module, _ask_verl),
    "xgrammar": Program(_transformers, lambda model: model, lambda model, work: _constrained(model, work, _xgrammar)),
    "lm-format-enforcer": Program(
        _transformers, lambda model: model, lambda model, work: _constrained(model, work, _format_enforcer)
    ),
}
