"""Tokenizers made on the spot: bytes, words behind a mark, and one name per token of the tiny models."""

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHAT = (
    "<s>{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)


def byte_level() -> PreTrainedTokenizerFast:
    """One token per byte, as GPT-2's has them; a character outside ASCII is several tokens."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def metaspace(*words: str) -> PreTrainedTokenizerFast:
    """Whole words behind a mark, as Llama 2's has them: what is decoded first loses its leading space."""
    vocab = {"<unk>": 0, **{f"▁{word}": i for i, word in enumerate(words, 1)}}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab=vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def words(size: int = 128, chat_template: str | None = CHAT) -> PreTrainedTokenizerFast:
    """Token i is the word `ti`; 0, 1, 2 pad, begin and end. Text gets `<s>` before it; so does the chat template."""
    special = ["<pad>", "<s>", "</s>"]
    named = ["user", "assistant", "Hello"]
    vocab = {word: i for i, word in enumerate([*special, *named, *(f"t{i}" for i in range(6, size))])}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab=vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Sequence([decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=chat_template,
    )
