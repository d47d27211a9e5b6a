"""Memory that keeps something alive, for what a graph keeps until its backward."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import numpy as np

from arraybridge.frameworks import hostmemory

__all__ = ["Token", "kept_by", "token_of"]


class Token(np.ndarray):
    """Memory of one number that keeps something alive: as long as the memory lives, in whichever framework.

    A framework that saves a tensor for its backward pass frees it when it is done, or when it means to
    compute it again. What is kept by the memory of that tensor goes with it.
    """

    kept: Any


_numbers = itertools.count(1)
_tokens: weakref.WeakValueDictionary[int, Token] = weakref.WeakValueDictionary()


def token_of(kept: Any) -> Token:
    """A number in memory of its own, shape ``(1,)`` and int32, that keeps ``kept``; see `kept_by`."""
    token = hostmemory.packed((1,), np.dtype(np.int32)).view(Token)
    # Far apart, so that one which somebody rounds (what is saved may be compressed) is that of no other.
    number = next(_numbers) * 0x9E3779B1 & 0x7FFFFFFF
    token[0] = number
    token.kept = kept
    _tokens[number] = token
    return token


def kept_by(number: int) -> Any:
    """What the token with this number keeps; None where its memory is gone, as after a copy."""
    token = _tokens.get(number)
    return None if token is None else token.kept
