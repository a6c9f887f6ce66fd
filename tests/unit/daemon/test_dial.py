"""The way to a gateway: which URL, under which pin and certificate, on which connection."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import pytest

from bettercompute.daemon.dial import DialSettings, GatewayLink
from bettercompute.daemon.identity import Identity, IdentityStore
from bettercompute.errors import Unavailable
from bettercompute.session.effects import Redial
from bettercompute.system import system_world
from bettercompute.transport.calls import DialFailed, DialKind
from tests.unit.daemon.fake_gateway import FakeGateway, join, state_config

NEW, SAME = Redial.NEW_CONNECTION, Redial.SAME_CONNECTION


class Bench:
    def __init__(self, tmp_path: Path, *, pins: tuple[str, ...] = ("ab" * 32,)) -> None:
        config = state_config(tmp_path)
        join(config, serving_ca_pins=pins)
        self.gateway = FakeGateway()
        self.identities = IdentityStore(config.state_dir)
        self.settings = DialSettings(environment={"HTTPS_PROXY": "http://proxy:3128"})
        self.link = GatewayLink(
            world=system_world(), identity=self.identity, settings=lambda: self.settings, dial=self.gateway.dial
        )

    async def identity(self) -> Identity:
        identity = self.identities.load()
        assert identity is not None
        return identity

    @property
    def urls(self) -> list[str]:
        return [target.url for target in self.gateway.targets]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def test_every_url_is_tried_before_any_is_tried_twice(bench: Bench) -> None:
    for _ in range(6):
        await bench.link.open_stream(redial=NEW, attempt=0)
    for first, second in zip(bench.urls[::2], bench.urls[1::2], strict=True):
        assert {first, second} == {"https://gw-a:443", "https://gw-b:443"}
    assert bench.gateway.targets[0].environment == {"HTTPS_PROXY": "http://proxy:3128"}
    assert bench.gateway.targets[0].server_name is None
    bench.link.close()


async def test_a_session_and_a_renewal_that_dial_at_once_share_a_connection(bench: Bench) -> None:
    first, second = await asyncio.gather(bench.link.connected(), bench.link.connected())
    assert first is second
    assert len(bench.gateway.targets) == 1
    bench.link.close()


async def test_the_configuration_names_other_gateways(bench: Bench) -> None:
    bench.settings = DialSettings(gateway_url=("https://10.0.0.1:8443",), server_name="gw.example")
    await bench.link.open_stream(redial=NEW, attempt=0)
    assert bench.urls == ["https://10.0.0.1:8443"]
    assert bench.gateway.targets[0].server_name == "gw.example"
    bench.link.close()


async def test_a_connection_is_kept_when_told_so_and_while_it_lives(bench: Bench) -> None:
    first = await bench.link.open_stream(redial=NEW, attempt=0)
    again = await bench.link.open_stream(redial=SAME, attempt=1)
    assert again.connection is first.connection
    assert bench.link.last_heard_ms > 0
    bench.gateway.connections[0].close()
    other = await bench.link.open_stream(redial=SAME, attempt=2)
    assert other.connection is not first.connection
    bench.link.close()
    bench.link.close()
    assert bench.link.last_heard_ms == 0


async def test_during_a_rotation_the_second_pin_is_tried(tmp_path: Path) -> None:
    bench = Bench(tmp_path, pins=("ab" * 32, "cd" * 32))
    bench.gateway.fail = DialFailed(DialKind.PIN_MISMATCH, "another serving CA")
    await bench.link.open_stream(redial=NEW, attempt=0)
    assert [target.serving_ca_spki_sha256.hex()[:2] for target in bench.gateway.targets] == ["ab", "cd"]
    assert len(set(bench.urls)) == 1
    bench.link.close()


async def test_other_failures_are_not_a_matter_of_pins(tmp_path: Path) -> None:
    bench = Bench(tmp_path, pins=("ab" * 32, "cd" * 32))
    bench.gateway.fail = DialFailed(DialKind.CONNECT, "gw: connection refused")
    with pytest.raises(DialFailed, match="connection refused"):
        await bench.link.open_stream(redial=NEW, attempt=0)
    assert len(bench.gateway.targets) == 1


async def test_a_pinned_certificate_is_remembered_and_told(bench: Bench) -> None:
    told: list[bytes] = []
    bench.link.on_serving_ca = told.append
    dialed = bench.gateway.dial

    async def dial(target):
        connection = await dialed(target)
        connection.serving_ca_pem = b"the pinned certificate"
        return connection

    bench.link._dial = dial
    await bench.link.open_stream(redial=NEW, attempt=0)
    await bench.link.open_stream(redial=NEW, attempt=0)
    assert told == [b"the pinned certificate"]
    assert [target.serving_ca_pem for target in bench.gateway.targets] == [None, b"the pinned certificate"]
    bench.link.close()


async def test_nowhere_to_dial_is_said(bench: Bench) -> None:
    with pytest.raises(Unavailable, match="no gateway to dial: set gateway_url"):
        bench.link._next_url(())


async def test_a_gateway_that_does_not_answer_is_not_the_next_one_as_well(bench: Bench) -> None:
    for count in (2, 3):
        urls = tuple(f"https://gw-{number}:443" for number in range(count))
        dialed = []
        for _ in range(40 * count):
            bench.link.url = bench.link._next_url(urls)
            dialed.append(bench.link.url)
        assert all(one != next_one for one, next_one in pairwise(dialed))
        assert {dialed.count(url) for url in urls} == {40}
    bench.link.url = bench.link._next_url(("https://gw-0:443",))
    assert bench.link._next_url(("https://gw-0:443",)) == "https://gw-0:443"
