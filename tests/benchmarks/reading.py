"""What the benchmarks that measure many plans of one model read it with."""

from typing import Any

from gac.models.loading import Loaded, load_model


def read(name: str) -> Loaded:
    """The model, with a tokenizer that cuts each text only once for all rows."""
    loaded = load_model(name)
    tokens: dict[str, Any] = {}

    def tokenizer(text: str, **options: Any) -> Any:
        if text not in tokens:
            tokens[text] = loaded.tokenizer(text, **options)
        return tokens[text]

    return load_model(loaded.model, tokenizer)
