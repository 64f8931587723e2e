"""The tokenizer: byte-level BPE, with special tokens and a chat template.

Byte-level BPE: Radford et al. 2019 ("Language Models are Unsupervised Multitask Learners").
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
SYSTEM, USER, ASSISTANT, END = "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL = [BOS, EOS, PAD, SYSTEM, USER, ASSISTANT, END]

# Words with one leading blank, single digits, runs of punctuation, and a line's indentation as one piece.
_SPLIT = r" ?[A-Za-z_]+|[0-9]| ?[^\sA-Za-z_0-9]+|\n+ *|\s+(?!\S)|\s+"

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ '<|system|>' }}"
    "{% elif message['role'] == 'assistant' %}{{ '<|assistant|>' }}"
    "{% else %}{{ '<|user|>' }}{% endif %}"
    "{{ '\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train the BPE on ``texts``. Special tokens take the first ids, in the order of ``SPECIAL``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write the tokenizer's files and the chat template as transformers' AutoTokenizer loads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": [SYSTEM, USER, ASSISTANT, END],
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": True,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def chat_text(ask: str, answer: str) -> str:
    """One exchange as the chat template renders it, without the leading BOS, with EOS after it."""
    return f"{USER}\n{ask}{END}\n{ASSISTANT}\n{answer}{END}{EOS}"
