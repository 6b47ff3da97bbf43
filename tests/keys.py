"""Key pairs to sign models with."""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

PEM = serialization.Encoding.PEM


def key_pair(folder: Path, name: str = "signer", curve: ec.EllipticCurve | None = None) -> tuple[str, str]:
    """Write a private and a public key; return their paths."""
    private = ec.generate_private_key(curve or ec.SECP256R1())
    secret = private.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    public = private.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    for suffix, data in (("key", secret), ("pub", public)):
        (folder / f"{name}.{suffix}").write_bytes(data)
    return str(folder / f"{name}.key"), str(folder / f"{name}.pub")
