"""A tokenizer of whole words for tests, as a Hugging Face folder keeps it."""

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")


def save_tokenizer(folder: Path, size: int = 160) -> None:
    """Write a tokenizer whose word "w7" has id 7; the first four ids are special."""
    vocabulary = {word: i for i, word in enumerate(SPECIAL)}
    vocabulary |= {f"w{i}": i for i in range(len(SPECIAL), size)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
    ).save_pretrained(folder)
