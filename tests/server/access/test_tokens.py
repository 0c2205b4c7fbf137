"""Tokens against the SDK's reader of them, and against a signature made by hand."""

import base64
import hashlib
import hmac
import json

from tinker.lib import _jwt_auth

from tuneserve_server.access.tokens import TTL_S, TokenClaims, is_token, new_token, read_token

SECRET = b"s" * 32
NOW_S = 1_800_000_000.0
CLAIMS = TokenClaims("alice", "0a1b", NOW_S + TTL_S)


def test_a_token_is_a_json_web_token_signed_with_hmac() -> None:
    header, body, signature = new_token(SECRET, CLAIMS, NOW_S).split(".")
    assert json.loads(base64.urlsafe_b64decode(f"{header}===")) == {
        "alg": "HS256",
        "kid": "tuneserve",
        "typ": "JWT",
    }
    key = hmac.new(SECRET, b"tokens", hashlib.sha256).digest()
    made = hmac.new(key, f"{header}.{body}".encode(), hashlib.sha256).digest()
    assert base64.urlsafe_b64decode(f"{signature}=") == made


def test_the_sdk_reads_its_claims_and_its_times() -> None:
    token = new_token(SECRET, CLAIMS, NOW_S)
    claims = _jwt_auth.jwt_claims(token)
    assert claims["org_id"] == "alice" and claims["sub"] == "tuneserve:key:0a1b"
    assert not claims["email"]  # keys have no addresses
    assert _jwt_auth._jwt_expiry(token) == NOW_S + 3600
    assert _jwt_auth._lifetime(token) == 3600
    assert token.startswith("eyJ")  # the SDK takes such a credential for a token


def test_claims_are_read_back_and_no_change_is_accepted() -> None:
    token = new_token(SECRET, CLAIMS, NOW_S)
    assert is_token(token) and read_token(SECRET, token) == CLAIMS
    assert read_token(b"t" * 32, token) is None
    header, body, signature = token.split(".")
    other = new_token(SECRET, TokenClaims("bob", "0a1b", CLAIMS.expires_s), NOW_S).split(".")[1]
    none = base64.urlsafe_b64encode(b'{"alg":"none"}').decode().rstrip("=")
    for changed in (f"{header}.{other}.{signature}", f"{none}.{body}.", f"{header}.{body}.", "."):
        assert read_token(SECRET, changed) is None


def test_a_token_of_anybody_else_is_not_taken_for_one_of_ours() -> None:
    for text in ("eyJhbGciOi.e30.x", "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.e30.x", "tml-a-b"):
        assert not is_token(text)
