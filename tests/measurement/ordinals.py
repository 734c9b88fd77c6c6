"""A tokenizer that needs no vocabulary."""

from typing import Any


class Ordinals:
    """A tokenizer of one token a character, its code point.

    Args:
        bos: the token that comes first where special tokens are added; None adds none.
    """

    def __init__(self, bos: int | None = None) -> None:
        self.bos_token_id = bos

    def __len__(self) -> int:
        return 0x110000

    def __call__(self, text: str, *, add_special_tokens: bool, **_: Any) -> dict[str, list[int]]:
        first = [self.bos_token_id] if add_special_tokens and self.bos_token_id is not None else []
        return {"input_ids": first + [ord(character) for character in text]}
