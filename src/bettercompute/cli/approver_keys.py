"""An approver's key file: made and read on the approver's own machine, and never sent anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bettercompute.cli import output
from bettercompute.system import environment

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

KEY_VARIABLE = "BETTER_COMPUTE_APPROVER_KEY"
OTHERS_MASK = 0o077

KeyFile = Annotated[
    Path | None, typer.Option("--key", help=f"Your key file, of `pki approvers keygen`. Default: {KEY_VARIABLE}.")
]


def make(path: Path) -> Path:
    """Make a key at `path`, for its owner only, and its public half beside it; never over a file that is there."""
    from bettercompute.pki import certificates, keyfiles

    public = path.with_name(path.name + ".pub")
    for taken in (path, public):
        if taken.exists():
            output.fail(f"{taken} is there already: choose another name; a key is never replaced", code=2)
    key = certificates.generate_key()
    disk = keyfiles.LocalDisk()
    keyfiles.replace_file(disk, path, keyfiles.key_to_pem(key))
    keyfiles.replace_file(disk, public, keyfiles.public_key_to_pem(key.public_key()))
    return public


def read(path: Path | None) -> ec.EllipticCurvePrivateKey:
    """Return the private key of the named file; refuse one that others could have read."""
    from bettercompute.pki import keyfiles

    named = path or (Path(found) if (found := environment().get(KEY_VARIABLE)) else None)
    if named is None:
        output.fail(f"name your key file: --key FILE, or {KEY_VARIABLE}", code=2)
    mode = output.run(named.stat).st_mode
    if mode & OTHERS_MASK:
        output.fail(f"{named} may be read by others (mode {mode & 0o777:o}): chmod 600 it, or make a new key", code=2)
    return output.run(lambda: keyfiles.key_from_pem(named.read_bytes(), name=str(named)))


def read_public(path: Path) -> bytes:
    """Return the SubjectPublicKeyInfo in DER of a public key file."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    from bettercompute.pki import keyfiles

    key = output.run(lambda: keyfiles.public_key_from_pem(path.read_bytes(), name=str(path)))
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def confirm(question: str, *, yes: bool) -> None:
    """Ask before something is signed; without a terminal only `--yes` says yes."""
    if yes:
        return
    if not typer.confirm(question, err=True):
        output.fail("nothing was signed", code=1)
