"""Contents of a cache of latents, and the angles by which keys are rotated when they are read."""

import inspect
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gac.runtime.fusion.elementwise import rotates_plainly
from gac.runtime.kernels.latent_attention.layout import TILE, turns_of
from gac.runtime.latents.positions import Positions
from gac.runtime.latents.quantise import QuantisedLatents

_MOVING = ("dynamic", "longrope")
"""Types of rotary embeddings whose frequencies follow the length of the text."""
_found: WeakKeyDictionary[Any, dict[Any, "Angles | None"]] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class Angles:
    """Rotation of the pairs of a head from one position to the next.

    Attributes:
        frequencies: radians, float32, shape ``(pairs,)``.
        turns: ``latent_layout.turns_of``, float32.
        scale: by which rotated keys are multiplied.
    """

    frequencies: Tensor
    turns: Tensor
    scale: float


@dataclass(frozen=True, eq=False)
class Rotary:
    """A model's rotary embedding, as one kind of layer uses it.

    Attributes:
        module: the model's.
        kind: the type of layer that it takes as an argument; None: it takes none.
    """

    module: Any
    kind: str | None

    @classmethod
    def of(cls, module: Any, attention: Any) -> "Rotary":
        """As an attention of the model uses it."""
        kinds = "layer_type" in inspect.signature(module.forward).parameters
        return cls(module, attention.config.layer_types[attention.layer_idx] if kinds else None)

    @property
    def frequencies(self) -> Tensor | None:
        """Radians a place, of the last call, shape ``(pairs,)``; None: the module has none."""
        return getattr(self.module, f"{self._prefix}inv_freq", None)

    @property
    def scale(self) -> float:
        """By which rotated keys are multiplied."""
        return float(getattr(self.module, f"{self._prefix}attention_scaling", 1.0))

    @property
    def moves(self) -> bool:
        """True if frequencies follow the length of the text."""
        types = getattr(self.module, "rope_type", "default")
        return (types.get(self.kind) if isinstance(types, dict) else types) in _MOVING

    def tables(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines at positions ``(batch, tokens)``, each ``(batch, tokens, rotated)``."""
        cosines, sines = self.module(like, positions, **self._options)
        return cosines, sines

    def tables_of(self, like: Tensor, positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
        """The same, each token with frequencies of its own, ``(batch, tokens, pairs)``; the module stays as it is."""
        forward = inspect.unwrap(type(self.module).forward)  # without what changes the frequencies

        def of_token(of_its: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
            module = {**self.module._buffers, **vars(self.module), f"{self._prefix}inv_freq": of_its}
            cosines, sines = forward(SimpleNamespace(**module), like, position.view(1, 1), **self._options)
            return cosines.flatten(), sines.flatten()

        cosines, sines = torch.vmap(of_token)(frequencies.flatten(0, 1), positions.flatten())
        return cosines.view(*positions.shape, -1), sines.view(*positions.shape, -1)

    @property
    def _prefix(self) -> str:
        return "" if self.kind is None else f"{self.kind}_"

    @property
    def _options(self) -> dict[str, str]:
        return {} if self.kind is None else {"layer_type": self.kind}


@dataclass(frozen=True, eq=False)
class Rotation:
    """Rotation of cached keys.

    Attributes:
        rotary: by which they are rotated.
        positions: of all tokens.
    """

    rotary: Rotary
    positions: Positions

    def tables(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of all tokens of keys ``(batch, tokens, ...)``, each ``(batch, tokens, rotated)``."""
        ids, frequencies = self.positions.table[..., 0], self.positions.frequencies
        if frequencies is None:
            cosines, sines = self.rotary.tables(keys, ids)
        else:
            cosines, sines = self.rotary.tables_of(keys, ids, frequencies)
        return cosines.to(keys.device), sines.to(keys.device)

    def angles(self, attention: Any, device: torch.device) -> Angles | None:
        """Those by which its model rotates in halves, by one angle a place; None: it rotates in another way."""
        known = _found.setdefault(self.rotary.module, {})
        key = self.rotary.kind, type(attention), attention.head_dim, device
        if key not in known:
            known[key] = self._angles(attention.head_dim, device) if rotates_plainly(type(attention)) else None
        return known[key]

    def _angles(self, size: int, device: torch.device) -> Angles | None:
        if self.rotary.moves or (frequencies := self.rotary.frequencies) is None:
            return None
        frequencies, scale = frequencies.to(device, torch.float32), self.rotary.scale
        places = torch.arange(TILE + 1, device=device)
        angles = places[:, None].float() * frequencies
        turns = torch.stack((angles.cos(), angles.sin()), dim=1)
        tables = torch.stack(self.rotary.tables(turns, places[None]), dim=2)[0]
        same = tables.shape[-1] == 2 * len(frequencies) and torch.allclose(
            turns.repeat(1, 1, 2) * scale, tables, atol=1e-4
        )
        return Angles(frequencies, turns_of(frequencies, size), scale) if same else None


@dataclass(frozen=True, eq=False)
class Latents:
    """Contents of one attention's cache: latents of all tokens.

    Attributes:
        keys: latents of the keys, shape ``(batch, tokens, groups * rank)``, or as they are rounded; where k_proj is no
            pair, the keys as they are attended to, shape ``(batch, tokens, heads * head_dim)``.
        values: the same of the values.
        length: how many tokens there are of those that the cache has room for, on the device; None: all.
        rotation: of the keys; None: they are not rotated, or need not be.
    """

    keys: Tensor | QuantisedLatents
    values: Tensor | QuantisedLatents
    length: Tensor | None
    rotation: Rotation | None

    @property
    def tokens(self) -> int:
        """For which the cache has room."""
        stored = self.keys if isinstance(self.keys, Tensor) else self.keys.words
        return stored.shape[1]

    def plain(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values, those that are rounded in a dtype."""
        keys, values = (item if isinstance(item, Tensor) else item.values(dtype) for item in (self.keys, self.values))
        return keys, values
