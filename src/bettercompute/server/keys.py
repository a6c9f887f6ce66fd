"""What the control plane's processes read from its folders: serving secrets, the first token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import structlog

from bettercompute.errors import Refused
from bettercompute.pki import certificates, keyfiles
from bettercompute.pki.certificates import Use
from bettercompute.pki.intent import IntentSigner, make_signer
from bettercompute.pki.join_token import check_gateway_url
from bettercompute.pki.keyfiles import KeyFolder, LocalDisk
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.server.config import Config
from bettercompute.server.internal_tls import names_of
from bettercompute.services.keys import authorities, held_certificates
from bettercompute.services.pki_setup import GATEWAY
from bettercompute.store import api_tokens
from bettercompute.store.database import Database
from bettercompute.store.signing import Signing
from bettercompute.transport.tls import ServerSecrets
from bettercompute.world import World

OPERATOR_TOKEN_FILE = "operator-token"  # noqa: S105 - a file's name
OPERATOR_NAME = "operator"

# What a process shows and by which CA it judges who is at the other end, of nodes and of our own processes.
SERVING_FILES = (f"{GATEWAY}.pem", f"{GATEWAY}.key", f"{keyfiles.SERVING_CA}.pem")
# All that a gateway holds which reaches the join service elsewhere.
GATEWAY_FILES = (*SERVING_FILES, f"{keyfiles.NODE_CA}.pem")

_log = structlog.get_logger("bettercompute.server.keys")


def check_serving_files(folder: KeyFolder, *, files: tuple[str, ...], what: str, now_ms: int) -> None:
    """Refuse INVALID_CONFIG in one sentence a folder in which `what` cannot start, naming what is missing or wrong."""
    missing = [name for name in files if not folder.path(name).is_file()]
    if missing:
        raise refuse(
            Reason.INVALID_CONFIG,
            f"{what} needs {', '.join(files)} in {folder.folder}, which lacks {', '.join(missing)}: where the CAs' "
            f"keys are, run `better-compute pki issue-gateway --san NAME --out DIR` and copy DIR to {folder.folder}",
        )
    leaf = folder.authority(GATEWAY).certificate
    serving_ca = folder.certificate(keyfiles.SERVING_CA)
    try:
        chain_der = certificates.chain_from_pem(folder.pem(GATEWAY))
        certificates.verify_chain(chain_der, roots=[serving_ca], use=Use.SERVER, now_ms=now_ms)
    except Refused as error:
        raise refuse(
            Reason.INVALID_CONFIG,
            f"{folder.path(SERVING_FILES[0])} cannot be used with the {SERVING_FILES[2]} beside it: {error.message}; "
            f"issue it anew for {', '.join(names_of(leaf))}",
        ) from error
    if f"{keyfiles.NODE_CA}.pem" in files:
        folder.certificate(keyfiles.NODE_CA)


def warn_of_needless_keys(folder: KeyFolder) -> None:
    """Log which keys lie in a gateway's folder without need: whoever takes the host takes them."""
    needless = sorted(set(folder.names()) - {GATEWAY})
    if needless:
        _log.warning("this gateway needs none of these keys: remove them", folder=str(folder.folder), keys=needless)


def serving_secrets(folder: KeyFolder, *, peers_ca: str = keyfiles.NODE_CA) -> Callable[[], ServerSecrets]:
    """Return a source of the serving certificate, its key and the CA of the other end, that follows the files.

    It is asked at each connection, so it only looks at their times and reads again when one has changed.
    """
    names = (f"{GATEWAY}.pem", f"{GATEWAY}.key", f"{peers_ca}.pem")
    held: tuple[tuple[int, ...], ServerSecrets] | None = None

    def load() -> ServerSecrets:
        nonlocal held
        # A folder that vanished for a moment must not stop a gateway that has its keys in memory.
        try:
            times = tuple(folder.path(name).stat().st_mtime_ns for name in names)
        except OSError:
            if held is None:
                raise
            return held[1]
        if held is None or held[0] != times:
            secrets = ServerSecrets(
                certificate_chain_pem=folder.pem(GATEWAY),
                private_key_pem=keyfiles.key_to_pem(folder.key(GATEWAY)),
                client_ca_pem=folder.pem(peers_ca),
            )
            held = times, secrets
        return held[1]

    return load


def worker_signing(folder: KeyFolder, *, world: World) -> Signing:
    """Return what signs under whichever command root the database names, by the worker keys of this folder.

    The files are read again only where a root is asked for whose worker key was not there before: a rotation brings it
    while the process runs. Refuses INVALID_CONFIG a folder of which no worker key can sign.
    """
    held = _worker_signers(folder, now_ms=world.clock.now_ms())

    def under(root_sha256: str) -> IntentSigner | None:
        if root_sha256 not in held:
            held.update(_worker_signers(folder, now_ms=world.clock.now_ms()))
        return held.get(root_sha256)

    return Signing(under)


def _worker_signers(folder: KeyFolder, *, now_ms: int) -> dict[str, IntentSigner]:
    signers: dict[str, IntentSigner] = {}
    why: Refused | None = None
    for worker in authorities(folder, keyfiles.WORKER):
        for root in held_certificates(folder, keyfiles.COMMAND_ROOT):
            try:
                signer = make_signer(key=worker.key, leaf=worker.certificate, root=root, now_ms=now_ms)
            except Refused as refused:
                why = refused
            else:
                signers[signer.root_sha256] = signer
    if not signers and why is not None:
        raise why
    return signers


def advertised_url(config: Config, folder: KeyFolder, *, gateway_is_here: bool) -> str:
    """Return what nodes are told to dial: the configured address, or the serving certificate's first name and the port.

    Raises `Refused` when neither says it.
    """
    if config.gateway.advertise_url:
        return check_gateway_url(config.gateway.advertise_url)
    if config.internal.host and not gateway_is_here:
        raise refuse(
            Reason.INVALID_CONFIG,
            "gateway.advertise_url is empty, and the gateways run elsewhere ([internal] host is set): set it to what "
            "nodes shall dial",
        )
    name = next(iter(names_of(folder.certificate(GATEWAY))), None)
    if name is None or config.gateway.port == 0:
        raise refuse(
            Reason.INVALID_CONFIG,
            "gateway.advertise_url is empty, and gateway.port is 0 or the serving certificate has no name: "
            "set advertise_url to what nodes shall dial",
        )
    return check_gateway_url(f"https://{f'[{name}]' if ':' in name else name}:{config.gateway.port}")


async def ensure_operator_token(database: Database, *, state_dir: Path, world: World) -> str | None:
    """Return the first administrator's token, which is kept in `state_dir/operator-token`.

    Made when the installation has no API token yet. None: there are tokens, and this folder does not hold the first.
    """
    path = state_dir / OPERATOR_TOKEN_FILE
    disk = LocalDisk()
    kept = disk.read(path)
    if kept is not None:
        token = kept.decode().strip()
        if await api_tokens.find(database, sha256=api_tokens.sha256_of(token)) is not None:
            return token
    if kept is None and await api_tokens.list_all(database):
        return None
    token = api_tokens.TOKEN_PREFIX + world.ids.random_bytes(24).hex()
    token_id = world.ids.uuid7()
    made = await api_tokens.create(
        database,
        token_id=token_id,
        name=OPERATOR_NAME if kept is None else f"{OPERATOR_NAME}-{token_id}",
        sha256=api_tokens.sha256_of(token),
        role="admin",
        created_by="serve",
    )
    if not made:
        return None
    keyfiles.replace_file(disk, path, f"{token}\n".encode())
    return token
