"""What a cache of latents holds of all tokens, and by which angles their keys are rotated when they are read."""

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .latent_layout import TILE, turns_of
from .latent_rounding import RoundedLatents
from .rotary import rotates_plainly

_MOVING = ("dynamic", "longrope")
"""Types of rotary embeddings whose frequencies follow the length of the text."""
_found: WeakKeyDictionary[Any, dict[Any, "Angles | None"]] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class Angles:
    """How far the pairs of a head are turned from one place to the next.

    Attributes:
        frequencies: radians, float32, shape ``(pairs,)``.
        turns: ``latent_layout.turns_of``, float32.
        scale: by which rotated keys are multiplied.
    """

    frequencies: Tensor
    turns: Tensor
    scale: float


@dataclass(frozen=True, eq=False)
class Rotation:
    """The rotary embedding of cached keys, whose positions count up by one.

    Attributes:
        rotary: the model's module.
        kind: the type of layer that it asks for; None: it asks for none.
        last: position of the last token of each text, ``(1 or batch, 1)``.
        end: how many tokens there were so far; those of a window and empty places of a static cache counted or not.
    """

    rotary: Any
    kind: str | None
    last: Tensor
    end: Any

    def tables(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of all tokens of keys ``(batch, tokens, ...)``, each ``(1 or batch, tokens, rotated)``."""
        tokens = keys.shape[1]
        first = (self.end - tokens) * (self.end > tokens)  # of a window the last tokens are kept
        at = torch.arange(tokens, device=keys.device) + first + 1 - self.end + self.last
        cosines, sines = self._of(keys, at)
        return cosines.to(keys.device), sines.to(keys.device)

    def angles(self, attention: Any, device: torch.device) -> Angles | None:
        """Those by which its model rotates in halves, by one angle a place; None: it rotates in another way."""
        known = _found.setdefault(self.rotary, {})
        key = self.kind, type(attention), attention.head_dim, device
        if key not in known:
            known[key] = self._angles(attention.head_dim, device) if rotates_plainly(type(attention)) else None
        return known[key]

    def _angles(self, size: int, device: torch.device) -> Angles | None:
        before = "" if self.kind is None else f"{self.kind}_"
        types = getattr(self.rotary, "rope_type", "default")
        frequencies = getattr(self.rotary, f"{before}inv_freq", None)
        if (types.get(self.kind) if isinstance(types, dict) else types) in _MOVING or frequencies is None:
            return None
        own = frequencies.to(device, torch.float32)
        scale = float(getattr(self.rotary, f"{before}attention_scaling", 1.0))
        places = torch.arange(TILE + 1, device=device)
        angles = places[:, None].float() * own
        turns = torch.stack((angles.cos(), angles.sin()), dim=1)
        tables = torch.stack(self._of(turns, places[None]), dim=2)[0]
        same = tables.shape[-1] == 2 * len(own) and torch.allclose(turns.repeat(1, 1, 2) * scale, tables, atol=1e-4)
        return Angles(own, turns_of(own, size), scale) if same else None

    def _of(self, like: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        cosines, sines = self.rotary(like, at, **({} if self.kind is None else {"layer_type": self.kind}))
        return cosines, sines


@dataclass(frozen=True, eq=False)
class Latents:
    """What one attention's cache holds of all tokens.

    Attributes:
        keys: latents of the keys, shape ``(batch, tokens, groups * rank)``, or as they are rounded; where k_proj is no
            pair, the keys as they are attended to, shape ``(batch, tokens, heads * head_dim)``.
        values: the same of the values.
        length: how many tokens there are of those that the cache has room for, on the device; None: all.
        rotation: of the keys; None: they are not rotated, or need not be.
    """

    keys: Tensor | RoundedLatents
    values: Tensor | RoundedLatents
    length: Tensor | None
    rotation: Rotation | None

    @property
    def tokens(self) -> int:
        """For which the cache has room."""
        held = self.keys if isinstance(self.keys, Tensor) else self.keys.words
        return held.shape[1]

    def plain(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values, those that are rounded in a dtype."""
        keys, values = (one if isinstance(one, Tensor) else one.values(dtype) for one in (self.keys, self.values))
        return keys, values
