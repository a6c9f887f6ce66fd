"""An administrator's word makes an identity that `bcd` can import, once per request."""

from __future__ import annotations

import asyncio
import json

import pytest

from bettercompute.daemon.identity import IdentityStore, Machine
from bettercompute.errors import Refused
from bettercompute.pki import identity_file, keyfiles
from bettercompute.protocol.statuses import Reason
from bettercompute.services.provision import ProvisionedNode
from bettercompute.store import audit, certificates, nodes
from tests.unit.services.joining import Node, Plane, make_plane


@pytest.fixture
async def plane(database, tmp_path) -> Plane:
    return await make_plane(database, tmp_path)


async def provision(plane: Plane, node: Node, *, node_id: str = "img-1", replace: bool = False) -> ProvisionedNode:
    return await plane.provision.provision(
        node_id=node_id, site="lab", role="node", csr_der=node.csr, asked_by="admin", replace=replace
    )


async def test_the_daemon_imports_what_was_provisioned(plane, tmp_path):
    node = Node()
    made = await provision(plane, node)
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / identity_file.KEY_FILE).write_bytes(keyfiles.key_to_pem(node.key))
    (folder / identity_file.CHAIN_FILE).write_bytes(made.chain_pem)
    (folder / identity_file.TRUST_FILE).write_bytes(made.signed_trust_bundle)
    (folder / identity_file.SERVING_CA_FILE).write_bytes(made.serving_ca_pem)
    (folder / identity_file.IDENTITY_FILE).write_text(json.dumps(made.identity))
    imported = IdentityStore(tmp_path / "state").import_folder(folder, machine=Machine())
    assert (imported.node.node_id, imported.node.site, imported.node.role) == ("img-1", "lab", "node")
    assert imported.record.gateway_urls == ("https://gw:443",)
    assert imported.trust.content.serving_ca_pins == (plane.keys.serving_ca_pin,)
    stored = await nodes.get(plane.database, node_id="img-1")
    assert stored is not None
    assert (stored.attestor, stored.session.session_epoch) == ("operator", 0)
    [entry] = await audit.list_page(plane.database, page_size=10)
    assert (entry.actor, entry.action, entry.target) == ("admin", "node.provision", "node/img-1")


async def test_the_same_request_gets_the_same_identity(plane):
    node = Node()
    made = await asyncio.gather(*(provision(plane, node) for _ in range(5)), return_exceptions=True)
    chains = {one.chain_pem for one in made if isinstance(one, ProvisionedNode)}
    assert len(chains) == 1
    assert (await provision(plane, node)).chain_pem in chains


async def test_a_node_that_there_is_is_replaced_only_on_demand(plane):
    first = await provision(plane, Node())
    with pytest.raises(Refused, match="there is a node img-1") as caught:
        await provision(plane, Node())
    assert caught.value.reason == Reason.CONFLICT
    assert len(await certificates.of_node(plane.database, node_id="img-1", page_size=10)) == 1
    second = await provision(plane, Node(), replace=True)
    assert (first.identity["identity_generation"], second.identity["identity_generation"]) == (1, 2)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"node_id": "N"}, Reason.INVALID_NAME),
        ({"site": "a b"}, Reason.INVALID_NAME),
        ({"role": "king"}, Reason.INVALID_NAME),
        ({"csr_der": b"x"}, Reason.BAD_CSR),
    ],
)
async def test_a_bad_request_is_refused(plane, change, reason):
    arguments = {"node_id": "n", "site": "s", "role": "node", "csr_der": Node().csr, "asked_by": "admin", **change}
    with pytest.raises(Refused) as caught:
        await plane.provision.provision(**arguments)
    assert caught.value.reason == reason
