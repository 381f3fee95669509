"""Names for the content of blocks: equal where the salt is, and what the model takes for all tokens up to the end."""

from __future__ import annotations

from array import array
from hashlib import sha256

from selective_compile.runtime.request_state import RequestState


def block_names(state: RequestState, count: int, block_size: int) -> list[bytes]:
    """At least the names of the first `count` blocks of a request, which are full of known tokens.

    Each name is a hash of the one before, so that it stands for all tokens up to the block's end; the first of
    all is that of the salt, and of the tokens of a prefix, on all of which the keys of each depend, and of the form
    in which the first token is computed. What the keys and values depend on besides is the same for all requests:
    positions start at 0, and a change of the weights takes all names away.
    """
    names = state.block_names
    if len(names) < count:
        tokens = state.taken(state.tokens, 0) if state.id_offset else state.tokens
        long = state.long_from == 0
        extend_names(names, tokens, state.terms.cache_salt, count, block_size, prefix=state.prefix, long=long)
    return names


def extend_names(
    names: list[bytes],
    tokens: array[int],
    salt: str | None,
    count: int,
    block_size: int,
    *,
    prefix: int = 0,
    long: bool = False,
) -> None:
    """Make `names` those of the first `count` blocks of tokens, unless it has as many already; so many tokens of a
    `prefix` see one another, and all are computed in the `long` form, or the first not."""
    assert count * block_size <= len(tokens), (len(tokens), count)
    name = names[-1] if names else _hashed(repr((salt, "long") if long else salt).encode() + tokens[:prefix].tobytes())
    for start in range(len(names) * block_size, count * block_size, block_size):
        name = _hashed(name + tokens[start : start + block_size].tobytes())
        names.append(name)


def _hashed(content: bytes) -> bytes:
    # 256 bits of a cryptographic hash: that two contents share a name need not be reckoned with, nor can it be
    # brought about by someone who chooses his tokens. SHA-256 because processors have instructions for it.
    return sha256(content).digest()
