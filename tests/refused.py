"""Assertions about errors."""

from collections.abc import Callable
from typing import Any

import pytest

from gac.core.errors import GacError, ModelError


def assert_refused(call: Callable[[], Any], *parts: str, error: type[GacError] = ModelError) -> None:
    """The call raises an error whose message begins with the first part and holds the others."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert message.startswith(parts[0]), message
    assert all(part in message for part in parts[1:]), message
