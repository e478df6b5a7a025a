"""A byte-level BPE tokenizer trained on the synthetic corpus; its end-of-sequence token is the prompt format's ``[DONE]``.

python -m tools.embedded_model.tokenizer --out DIR
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hf_fastdecode.assets import BEGIN, DONE

from .corpus import training_blocks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD: Final = "<|pad|>"
VOCAB_SIZE: Final = 1536
_BLOCKS: Final = 20


def train_tokenizer(seed: int = 0, vocab_size: int = VOCAB_SIZE, blocks: int = _BLOCKS) -> PreTrainedTokenizerFast:
    """Train on the first blocks of the training split. Ids: 0 `PAD`, 1 `DONE` (eos), 2 `BEGIN`.

    `DONE` ends every example of a few-shot prompt and every completion, so generate() stops on it; `BEGIN` is one token,
    so what precedes a completion never merges with it.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, DONE, BEGIN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (example.as_text() for block in training_blocks(seed, blocks) for example in block)
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=DONE,
        additional_special_tokens=[BEGIN],
        padding_side="left",
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for tokenizer.json and tokenizer_config.json")
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    train_tokenizer(args.seed, args.vocab_size).save_pretrained(args.out)


if __name__ == "__main__":
    main()
