"""Facts hidden in a text: answerable from it, and of the length that was asked for."""

from __future__ import annotations

import json
import re

import pytest
from transformers import AutoTokenizer

from benchmarks.workloads.cases import parse_points, problem_prompts
from benchmarks.workloads.document import MOST_FACTS, Fact, is_right, make_document, make_facts
from hf_fastdecode.assets import MODEL_PATH, embedded_tasks, few_shot_prompt
from hf_fastdecode.errors import InputError
from hf_fastdecode.evals.tasks import load_tasks

READINGS = {
    r"What colour is the fur of the dog named (\w+)\?": r"The dog named {} has fur that is (\w+)\.",
    r"Which code opens the locker of (\w+)\?": r"The locker of {} opens with the code (\d+)\.",
    r"Where does a cousin of (\w+) live\?": r"A cousin of {} lives in (\w+)\.",
}


@pytest.fixture(scope="module")
def count():
    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    return lambda text: len(tokenizer(text, verbose=False).input_ids)


def words(text):
    return len(text.split())


def answers(text, question):
    """What the text says, wherever it does."""
    for asked, said in READINGS.items():
        if found := re.fullmatch(asked, question):
            return re.findall(said.format(found[1]), text)
    raise AssertionError(question)


@pytest.mark.parametrize("tokens", [700, 1024, 3000, 20000])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_question_is_answered_by_the_text_once(tokens, seed, count):
    document = make_document(count, tokens, seed=seed)
    text, _, solved = document.prefix.rpartition("Answer the questions about the text above.")
    assert document.facts
    for fact in document.facts:
        assert answers(text, fact.question) == [fact.answer]
        assert fact.question not in document.prefix
        assert document.prompt(fact) == f"{document.prefix}Question: {fact.question}\nAnswer:"
    examples = re.findall(r"Question: (.*)\nAnswer: (.*)\n\n", solved)
    assert len(examples) == 5
    for question, answer in examples:
        assert answers(text, question) == [answer]


@pytest.mark.parametrize("tokens", [700, 1024, 3000, 20000])
def test_the_length_is_the_one_asked_for_but_for_a_sentence(tokens, count):
    document = make_document(count, tokens)
    assert tokens - 60 < count(document.prefix) <= tokens
    assert len(document.facts) <= MOST_FACTS
    facts = sum(count(fact.sentence) for fact in document.facts)
    assert facts < tokens / 2
    assert (len(document.facts) == MOST_FACTS) == (tokens == 20000)


def test_facts_lie_everywhere_in_the_text():
    text = make_document(words, 4000).prefix.partition("Answer the questions")[0]
    places = [found.start() / len(text) for found in re.finditer("The dog named|The locker of|A cousin of", text)]
    for part in range(10):
        assert any(part <= 10 * place < part + 1 for place in places)


def test_the_seed_makes_the_text(count):
    assert make_document(count, 1024, seed=3) == make_document(count, 1024, seed=3)
    assert make_document(count, 1024, seed=3).prefix != make_document(count, 1024, seed=4).prefix


def test_names_are_told_apart():
    facts = make_facts(MOST_FACTS + 5, 0)
    assert len({fact.question for fact in facts}) == len(facts)
    assert make_facts(7, 0) == facts[:7]


def test_texts_that_are_too_short_are_refused():
    message = "`tokens=60` leave no room for 5 solved questions and a fact to ask about, which take about "
    with pytest.raises(InputError, match=message):
        make_document(words, 60)


def test_what_is_said_to_be_needed_is_enough():
    with pytest.raises(InputError) as raised:
        make_document(words, 60)
    least = int(re.search(r"about (\d+) tokens", str(raised.value))[1])
    assert make_document(words, least).facts


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (" teal", True),
        (" Teal.\n\nQuestion: Which", True),
        ("\nteal", True),
        (" teal blue", False),
        (" steal", False),
        ("", False),
        ("\n", False),
    ],
)
def test_an_answer_is_right_if_its_first_line_is(text, right):
    assert is_right(text, Fact("", "", "teal")) is right


def test_the_embedded_tasks_have_mbpps_prompt():
    prompts = problem_prompts(load_tasks("embedded"), 3)
    assert prompts == [few_shot_prompt(task, 3) for task in embedded_tasks()]


def test_tasks_of_another_form_are_refused(tmp_path):
    path = tmp_path / "humaneval.jsonl"
    record = {"task_id": "HumanEval/0", "prompt": "def f():\n", "test": "check", "entry_point": "f"}
    path.write_text(json.dumps(record | {"canonical_solution": "    return 1\n"}) + "\n")
    with pytest.raises(InputError, match="task HumanEval/0 begins with a signature; the prompt format austin is"):
        problem_prompts(load_tasks("humaneval", data=path), 3)


@pytest.mark.parametrize("text", ["", "8", "8x", "x8", "0x2", "2x-1", "2x2,", "²x2", "2x2x2"])
def test_points_of_another_form_are_refused(text):
    with pytest.raises(InputError, match="`points` are PROBLEMSxSAMPLES with commas between, such as 4x8,8x16, got"):
        parse_points(text)
