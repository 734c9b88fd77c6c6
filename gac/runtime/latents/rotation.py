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
from gac.runtime.latents.rounded import Parts

_angles: WeakKeyDictionary[Any, dict[Any, "Angles | None"]] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class Angles:
    """Rotation of the pairs of a head from one position to the next."""

    frequencies: Tensor  # radians, float32, shape ``(pairs,)``
    turns: Tensor  # ``layout.turns_of``, float32
    scale: float  # by which rotated keys are multiplied


@dataclass(frozen=True, eq=False)
class Rotary:
    """A model's rotary embedding, as one kind of layer uses it."""

    module: Any  # the model's
    kind: str | None  # the type of layer that it takes as an argument; None: it takes none

    @classmethod
    def of(cls, module: Any, attention: Any) -> "Rotary":
        kinds = "layer_type" in inspect.signature(module.forward).parameters
        return cls(module, attention.config.layer_types[attention.layer_idx] if kinds else None)

    @property
    def frequencies(self) -> Tensor | None:
        """Radians a position, of the last call, shape ``(pairs,)``; None: the module has none."""
        return getattr(self.module, f"{self._prefix}inv_freq", None)

    @property
    def moves(self) -> bool:
        """True if frequencies follow the length of the text."""
        types = getattr(self.module, "rope_type", "default")
        return (types.get(self.kind) if isinstance(types, dict) else types) in ("dynamic", "longrope")

    def tables(self, keys: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
        """Cosines and sines of all tokens of keys ``(batch, tokens, ...)``, each ``(batch, tokens, rotated)``."""
        ids, frequencies = positions.table[..., 0], positions.frequencies
        if frequencies is None:
            cosines, sines = self.module(keys, ids, **self._options)
        else:
            cosines, sines = self._tables_of(keys, ids, frequencies)
        return cosines.to(keys.device), sines.to(keys.device)

    def _tables_of(self, like: Tensor, ids: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
        """The same, each token with frequencies of its own, ``(batch, tokens, pairs)``; the module stays as it is."""
        forward = inspect.unwrap(type(self.module).forward)  # without what changes the frequencies

        def of_token(frequencies: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
            module = {**self.module._buffers, **vars(self.module), f"{self._prefix}inv_freq": frequencies}
            cosines, sines = forward(SimpleNamespace(**module), like, position.view(1, 1), **self._options)
            return cosines.flatten(), sines.flatten()

        cosines, sines = torch.vmap(of_token)(frequencies.flatten(0, 1), ids.flatten())
        return cosines.view(*ids.shape, -1), sines.view(*ids.shape, -1)

    def angles(self, attention: Any, device: torch.device) -> Angles | None:
        """Those by which its model rotates in halves, by one angle a position; None: it rotates in another way."""
        cached = _angles.setdefault(self.module, {})
        key = self.kind, type(attention), attention.head_dim, device
        if key not in cached:
            cached[key] = self._measured(attention.head_dim, device) if rotates_plainly(type(attention)) else None
        return cached[key]

    def _measured(self, size: int, device: torch.device) -> Angles | None:
        if self.moves or (frequencies := self.frequencies) is None:
            return None
        frequencies = frequencies.to(device, torch.float32)
        scale = float(getattr(self.module, f"{self._prefix}attention_scaling", 1.0))
        ids = torch.arange(TILE + 1, device=device)
        angles = ids[:, None].float() * frequencies
        expected = torch.stack((angles.cos(), angles.sin()), dim=1).repeat(1, 1, 2) * scale
        tables = torch.stack(self.module(expected, ids[None], **self._options), dim=2)[0]
        same = tables.shape == expected.shape and torch.allclose(expected, tables, atol=1e-4)
        return Angles(frequencies, turns_of(frequencies, size), scale) if same else None

    @property
    def _prefix(self) -> str:
        return "" if self.kind is None else f"{self.kind}_"

    @property
    def _options(self) -> dict[str, str]:
        return {} if self.kind is None else {"layer_type": self.kind}


@dataclass(frozen=True, eq=False)
class Latents:
    """Contents of one attention's cache: latents of all tokens."""

    # latents of the keys, shape ``(batch, tokens, groups * rank)``, or as they are quantised; where k_proj is no pair,
    # the keys as they are attended to, shape ``(batch, tokens, heads * head_dim)``
    keys: Tensor | QuantisedLatents | Parts
    values: Tensor | QuantisedLatents | Parts  # the same of the values
    length: Tensor | None  # how many tokens there are of those that the cache has room for, on the device; None: all
    rotary: Rotary | None  # by which keys are rotated; None: they are not, or need not be
    positions: Positions | None  # of all tokens, for that

    @property
    def tokens(self) -> int:
        assert not isinstance(self.keys, Parts)
        stored = self.keys if isinstance(self.keys, Tensor) else self.keys.words
        return stored.shape[1]  # for which the cache has room
