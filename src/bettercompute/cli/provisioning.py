"""`nodes provision`: make the key here, have its request signed, write what `bcd node` imports."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from bettercompute.cli.client import ApiClient, path_of
from bettercompute.errors import Refused
from bettercompute.pki import certificates, identity_file, keyfiles
from bettercompute.pki.keyfiles import LocalDisk
from bettercompute.protocol.statuses import Reason, refuse


def write_identity(
    client: ApiClient, *, node_id: str, site: str | None, role: str, out: Path, replace: bool = False
) -> dict[str, Any]:
    """Write `node.pem`, `node.key`, `serving-ca.pem`, `trust-bundle.bin` and `identity.json` into `out`.

    The key is written before it is asked for, so that a lost answer can be asked for again. Raises `Refused` when the
    folder holds something else, or the API refuses.
    """
    disk = LocalDisk()
    try:
        keyfiles.make_folders(disk, out.absolute())
        strangers = sorted(set(disk.names(out)) - {identity_file.KEY_FILE})
        if strangers:
            raise refuse(Reason.CONFLICT, f"{out} is not empty ({', '.join(strangers[:5])}): name another folder")
        key_path = out / identity_file.KEY_FILE
        key_pem = disk.read(key_path)
        if key_pem is None:
            key_pem = keyfiles.key_to_pem(certificates.generate_key())
            keyfiles.replace_file(disk, key_path, key_pem)
        key = keyfiles.key_from_pem(key_pem, name=str(key_path))
        csr = x509.load_der_x509_csr(certificates.make_csr(key)).public_bytes(Encoding.PEM).decode()
        request = {"csr_pem": csr, "role": role, "replace": replace} | ({"site": site} if site else {})
        answer = client.post(path_of("nodes", node_id, "provision"), request)
        files = {
            identity_file.CHAIN_FILE: answer["chain_pem"].encode(),
            identity_file.SERVING_CA_FILE: answer["serving_ca_pem"].encode(),
            identity_file.TRUST_FILE: base64.b64decode(answer["trust_bundle_base64"]),
            identity_file.IDENTITY_FILE: (json.dumps(answer["identity"], indent=2) + "\n").encode(),
        }
        for name, content in files.items():
            keyfiles.replace_file(disk, out / name, content)
    except OSError as error:
        raise _unwritable(out, error) from None
    return {"node_id": answer["node_id"], "out": str(out), "files": sorted([*files, identity_file.KEY_FILE])}


def _unwritable(out: Path, error: OSError) -> Refused:
    return refuse(Reason.BAD_REQUEST, f"{out}: {error.strerror or error}; name a folder that can be written")
