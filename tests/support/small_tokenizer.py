"""A tokenizer with a token for each character, and an end of sequence."""

import string

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CHARACTERS = '{}[]":,.-+ \n\\_' + string.digits + string.ascii_lowercase + string.ascii_uppercase


def small_tokenizer(vocab_size: int) -> Tokenizer:
    """A tokenizer for the first characters, whose last token ends a sequence."""
    as_bytes = {" ": "Ġ", "\n": "Ċ"}
    characters = CHARACTERS[: vocab_size - 1]
    assert len(characters) == vocab_size - 1
    vocab = {as_bytes.get(each, each): index for index, each in enumerate(characters)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<end>", special=True)])
    return made
