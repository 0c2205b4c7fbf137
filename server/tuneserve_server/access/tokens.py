"""Tokens: JSON Web Tokens (RFC 7519) that stand for a key for an hour.

They are signed with HMAC-SHA256 under the store's secret, so every API process accepts them. A
token names its key, which is looked up at each use: a revoked key's tokens end with it.
"""

import base64
import hashlib
import hmac
from dataclasses import dataclass

import msgspec

TTL_S = 3600
ISSUER = "tuneserve"


def _encoded(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


# ``kid`` tells our tokens from those of others, which are names of tenants in open mode.
_HEADER = _encoded(b'{"alg":"HS256","kid":"tuneserve","typ":"JWT"}')


@dataclass(frozen=True)
class TokenClaims:
    """The tenant and the key that a token stands for; in open mode, there is no key."""

    tenant: str
    key_id: str
    expires_s: float


class _Claims(msgspec.Struct):
    sub: str
    org_id: str
    exp: int
    key: str = ""
    iat: int = 0
    iss: str = ISSUER
    email: str = ""


def is_token(text: str) -> bool:
    """Return whether the text says that it is a token of such a server."""
    return text.startswith(f"{_HEADER}.")


def new_token(secret: bytes, claims: TokenClaims, now_s: float) -> str:
    """Return a signed token with these claims, and those that the SDK shows (``whoami``)."""
    body = _Claims(
        sub=f"tuneserve:key:{claims.key_id}" if claims.key_id else f"tuneserve:{claims.tenant}",
        org_id=claims.tenant,
        exp=int(claims.expires_s),
        key=claims.key_id,
        iat=int(now_s),
    )
    signed = f"{_HEADER}.{_encoded(msgspec.json.encode(body))}"
    return f"{signed}.{_signature(secret, signed)}"


def read_token(secret: bytes, token: str) -> TokenClaims | None:
    """Return the claims of a token; None unless its signature is right. Its expiry is not checked.

    The header is never read: the signature covers it, and there is one algorithm.
    """
    signed, _, signature = token.rpartition(".")
    if not hmac.compare_digest(_signature(secret, signed).encode(), signature.encode()):
        return None
    raw = signed.rpartition(".")[2]
    body = msgspec.json.decode(base64.urlsafe_b64decode(raw + "=" * (-len(raw) % 4)), type=_Claims)
    return TokenClaims(body.org_id, body.key, body.exp)


def _signature(secret: bytes, signed: str) -> str:
    key = hmac.new(secret, b"tokens", hashlib.sha256).digest()  # the secret signs links, too
    return _encoded(hmac.new(key, signed.encode(), hashlib.sha256).digest())
