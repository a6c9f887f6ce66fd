"""`logs.collect`: what it reads, what it may reach, and that neither can be widened by whoever sends commands."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from bettercompute.daemon.config import Config
from bettercompute.daemon.handlers import HandlerFailed, _upload, logs_collect
from bettercompute.daemon.handlers.logs_collect import LogsCollect
from bettercompute.daemon.log_sources import LogsSettings
from bettercompute.delivery.commands import CommandState
from bettercompute.protocol import messages
from bettercompute.session.inputs import HandlerFinished
from tests.unit.daemon.handler_bench import HandlerBench, handler_bench
from tests.unit.daemon.put_server import PutServer, put_server

KIND = "logs.collect"


@dataclass
class Place:
    bench: HandlerBench
    server: PutServer
    folder: Path

    def write(self, name: str, content: bytes) -> str:
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        return str(file)

    def allow(self, **changes: object) -> None:
        config = self.bench.settings.value
        self.bench.settings.value = replace(config, logs=replace(config.logs, **changes))  # type: ignore[arg-type]

    async def collect(self, *files: str, **fields: object) -> HandlerFinished:
        values: dict[str, object] = {"upload_url": self.server.url, "files": files} | fields
        return await self.bench.run(KIND, messages.LogsCollectPayload(**values))  # type: ignore[arg-type]


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    folder = tmp_path / "logs"
    folder.mkdir()
    async with put_server(tmp_path) as (server, ca_file):
        settings = LogsSettings(folders=(str(folder),), allow_networks=("127.0.0.1/32",), ca_file=ca_file)
        async with handler_bench(tmp_path, Config(logs=settings), LogsCollect()) as bench:
            yield Place(bench, server, folder)


def open_files() -> set[str]:
    """What this process has open."""
    return {os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()}


def journalctl(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "bin" / "journalctl"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)
    monkeypatch.setattr(logs_collect, "_ENVIRONMENT", {"PATH": f"{program.parent}:/usr/bin:/bin"})


async def test_files_are_filtered_compressed_and_put_with_their_headers(place: Place) -> None:
    one = place.write("one.log", b"keep 1\ndrop\nkeep 2\n")
    two = place.write("deep/er/two.log", b"keep 3")
    header = messages.UploadHeader(name="x-amz-acl", value="private")
    ending = await place.collect(one, two, contains="keep", upload_headers=[header])
    assert ending.state is CommandState.SUCCEEDED, ending.message
    result = messages.LogsCollectResult.FromString(ending.result)
    ((head, body),) = place.server.requests
    assert head.startswith("PUT /bucket/key?X-Signature=secret HTTP/1.1\r\n")
    assert f"host: 127.0.0.1:{place.server.port}\r\n" in head.lower()
    assert "x-amz-acl: private\r\n" in head
    assert gzip.decompress(body) == b"keep 1\nkeep 2\nkeep 3"
    assert (result.lines, result.read_bytes, result.uploaded_bytes) == (3, 20, len(body))
    assert (result.sha256, result.http_status, result.truncated) == (hashlib.sha256(body).digest(), 200, False)
    stages = [told.progress.stage for told in place.bench.progressed if told.progress is not None]
    assert stages


async def test_a_bound_cuts_at_a_line_and_says_so(place: Place) -> None:
    file = place.write("long.log", b"0123456789\n" * 10)
    place.allow(size_max_bytes=40)
    ending = await place.collect(file, compression=messages.LOG_COMPRESSION_NONE, size_max_bytes=10_000)
    result = messages.LogsCollectResult.FromString(ending.result)
    assert (result.lines, result.truncated) == (3, True)
    assert place.server.requests[0][1] == b"0123456789\n" * 3


async def test_no_file_elsewhere_is_read_not_through_links_either(place: Place, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret\n")
    (place.folder / "link").symlink_to(secret)
    (place.folder / "up").symlink_to(tmp_path)
    os.mkfifo(place.folder / "pipe")
    good = place.write("good.log", b"good\n")
    bad = {
        str(secret): "permission-denied: not below a folder",
        f"{place.folder}/../secret": "malformed: an absolute path without `..`",
        "good.log": "malformed: an absolute path",
        f"{place.folder}/link": "malformed: a symbolic link",
        f"{place.folder}/up/secret": "not-found",
        f"{place.folder}/pipe": "malformed: not a regular file",
        f"{place.folder}/none": "not-found",
        str(place.folder): "permission-denied: not below",
    }
    ending = await place.collect(*bad, good, compression=messages.LOG_COMPRESSION_NONE)
    result = messages.LogsCollectResult.FromString(ending.result)
    assert [gap.what for gap in result.unreadable] == list(bad)
    for gap in result.unreadable:
        assert gap.reason.startswith(bad[gap.what]), gap
    assert place.server.requests[0][1] == b"good\n"
    ending = await place.collect(str(secret))
    assert (ending.state, ending.reason) == (CommandState.FAILED, "nothing-readable")
    assert len(place.server.requests) == 1


async def test_the_journal_is_asked_by_unit_time_and_priority(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journalctl(tmp_path, monkeypatch, 'printf "%s\\n" "$@"')
    payload = {"units": ["ssh.service", "-x"], "since_ms": 1_500, "until_ms": 9_000, "priority_max": 3}
    ending = await place.collect(**payload)
    assert ending.state is CommandState.SUCCEEDED, ending.message
    assert gzip.decompress(place.server.requests[0][1]).decode().split() == [
        *("--no-pager", "--quiet", "--output=short-iso", "--unit=ssh.service", "--unit=-x"),
        *("--since=@1.500", "--until=@9.000", "--priority=3"),
    ]
    ending = await place.collect(contains="--quiet")
    assert gzip.decompress(place.server.requests[1][1]) == b"--quiet\n"


async def test_an_endless_journal_is_cut_and_a_broken_one_quoted(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journalctl(tmp_path, monkeypatch, "exec yes 2>/dev/null")
    place.allow(size_max_bytes=100_000)
    result = messages.LogsCollectResult.FromString((await place.collect()).result)
    assert (result.truncated, result.read_bytes) == (True, 100_000)
    (tmp_path / "bin/journalctl").write_text("#!/bin/sh\necho no journal here >&2; exit 1\n")
    ending = await place.collect()
    assert (ending.reason, "no journal here" in ending.message) == ("journal-failed", True)
    monkeypatch.setattr(logs_collect, "_ENVIRONMENT", {"PATH": str(tmp_path)})
    assert (await place.collect()).reason == "no-journal"


@pytest.mark.parametrize("answer", ["302 Found\r\nlocation: https://127.0.0.1/elsewhere", "403 Forbidden"])
async def test_no_redirect_is_followed_and_nothing_of_an_answer_comes_back(place: Place, answer: str) -> None:
    place.server.answer = answer
    ending = await place.collect(place.write("a.log", b"a\n"))
    assert ending.reason == "upload-refused"
    assert answer[:3] in ending.message
    assert "inside" not in ending.message
    assert "secret" not in ending.message
    assert len(place.server.requests) == 1


async def test_a_server_that_nobody_vouches_for_gets_nothing(place: Place) -> None:
    place.allow(ca_file=None)
    ending = await place.collect(place.write("a.log", b"a\n"))
    assert ending.reason == "upload-failed"
    assert "certificate" in ending.message.lower()
    assert place.server.requests == []


async def test_a_stalled_upload_is_broken_off_by_a_cancel(place: Place) -> None:
    place.server.stalls = True
    file = place.write("a.log", b"a\n")
    place.bench.start(KIND, messages.LogsCollectPayload(upload_url=place.server.url, files=[file]))
    await asyncio.wait_for(place.server.stalled.wait(), 30)
    place.bench.executor.stop("c1", "enough")
    assert (await place.bench.ending()).state is CommandState.CANCELLED


@pytest.mark.parametrize("how", ["cancelled", "out of time"])
async def test_a_file_without_an_end_is_not_read_on(place: Place, how: str) -> None:
    file = place.write("a.log", b"")
    os.truncate(file, 1 << 42)
    payload = messages.LogsCollectPayload(upload_url=place.server.url, files=[file], contains="x")
    place.bench.start(KIND, payload, timeout_ms=30_000 if how == "cancelled" else 300)
    if how == "cancelled":
        await asyncio.wait_for(place.bench.told.get(), 30)  # that it reads
        place.bench.executor.stop("c1", "enough")
    ending = await place.bench.ending()
    assert ending.state is (CommandState.CANCELLED if how == "cancelled" else CommandState.FAILED)
    assert ending.reason == ("cancelled" if how == "cancelled" else "timeout")
    assert file not in open_files()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"priority_max": 8, "files": []}, "priority_max is 8"),
        ({"since_ms": 5}, "are of the journal"),
        ({"contains": "a\nb"}, "one line"),
        ({"units": ["a\nb"], "files": []}, "names of units"),
        ({"files": ["/x"] * 65}, "64 files"),
    ],
    ids=["priority", "since", "contains", "units", "files"],
)
async def test_what_cannot_be_meant_is_refused(place: Place, fields: dict[str, object], words: str) -> None:
    ending = await place.collect(*(() if "files" in fields else ("/x",)), **fields)
    assert ending.reason == "invalid-payload"
    assert words in ending.message


@pytest.mark.parametrize(
    ("url", "headers", "words"),
    [
        ("http://192.0.2.1/x", [], "only https"),
        ("ftp://192.0.2.1/x", [], "only https"),
        ("file:///etc/passwd", [], "only https"),
        ("https:///x", [], "must name a host"),
        ("https://user:word@192.0.2.1/x", [], "no user"),
        ("https://[::1/x", [], "not a URL"),
        ("https://192.0.2.1/a b", [], "printable ASCII"),
        ("https://127.0.0.1/x", [], "allow_networks"),
        ("https://localhost/x", [], "allow_networks"),
        ("https://169.254.169.254/latest", [], "allow_networks"),
        ("https://[fe80::1]/x", [], "allow_networks"),
        ("https://[::ffff:127.0.0.1]/x", [], "allow_networks"),
        ("https://[fd00:ec2::254]/x", [], "allow_networks"),
        ("https://168.63.129.16/x", [], "allow_networks"),
        ("https://0.0.0.0/x", [], "allow_networks"),
        ("https://0.1.2.3/x", [], "allow_networks"),
        ("https://192.0.0.192/x", [], "allow_networks"),
        ("https://[fd20:ce::254]/x", [], "allow_networks"),
        ("https://192.0.2.1:0/x", [], "port 0"),
        ("https://.../x", [], "no host name"),
        (f"https://{'a' * 64}.example/x", [], "no host name"),
        ("https://10.0.0.1/x", [("Host", "other")], "cannot be given"),
        ("https://10.0.0.1/x", [("a b", "c")], "cannot be given"),
        ("https://10.0.0.1/x", [("a", "b\r\nc: d")], "printable ASCII"),
        ("https://10.0.0.1/x", [("a", "b")] * 33, "at most 32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_where_an_upload_may_not_go(url: str, headers: list[tuple[str, str]], words: str) -> None:
    with pytest.raises(HandlerFailed, match=words) as caught:
        await _upload.judge(url, headers, settings=LogsSettings())
    assert caught.value.reason == "upload-not-allowed"


async def test_where_an_upload_goes() -> None:
    target = await _upload.judge("https://10.0.0.1/a?b=c%20d", [("X-A", "")], settings=LogsSettings())
    assert (target.address, target.port, target.path) == ("10.0.0.1", 443, "/a?b=c%20d")
    assert dict(target.headers) == {"x-a": ""}
    plain = await _upload.judge("http://10.0.0.1:81", [], settings=LogsSettings(allow_http=True))
    assert (plain.port, plain.path, plain.authority) == (81, "/", "10.0.0.1:81")
