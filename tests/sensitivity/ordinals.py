"""A tokenizer that needs no vocabulary."""

from typing import Any


class Ordinals:
    """A tokenizer of one token a character, its code point, and a BOS of 0 where special tokens are added."""

    bos_token_id = 0

    def __call__(self, text: str, *, add_special_tokens: bool, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [0] * add_special_tokens + [ord(character) for character in text]}
