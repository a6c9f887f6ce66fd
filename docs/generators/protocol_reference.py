"""The protocol's reference: every service, message and enum of proto/, with its own comment."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)
from grpc_tools import protoc

from docs.generators.markdown import anchor, code, generated, table

WELL_KNOWN = Path(protoc.__file__).parent / "_proto"
ORDER = ("session", "commands", "inventory", "common", "site", "driver")

# Field numbers of descriptor.proto: how the paths of comments are made.
SYNTAX, MESSAGE, ENUM, SERVICE = 12, 4, 5, 6
FIELD, NESTED, NESTED_ENUM, VALUE, METHOD = 2, 3, 4, 2, 2

SCALARS = {
    FieldDescriptorProto.TYPE_DOUBLE: "double",
    FieldDescriptorProto.TYPE_INT64: "int64",
    FieldDescriptorProto.TYPE_UINT64: "uint64",
    FieldDescriptorProto.TYPE_INT32: "int32",
    FieldDescriptorProto.TYPE_BOOL: "bool",
    FieldDescriptorProto.TYPE_STRING: "string",
    FieldDescriptorProto.TYPE_BYTES: "bytes",
    FieldDescriptorProto.TYPE_UINT32: "uint32",
}

INTRODUCTION = """\
# Protocol reference

Every declaration with its comment. [protocol.md](../protocol.md) says how the messages behave. Packages `agent` and
`common` are frozen: they only grow. `site` and `driver` are drafts."""

Comments = Mapping[tuple[int, ...], str]


def page(proto: Path) -> str:
    """Return docs/reference/protocol.md."""
    parts = [generated("proto/"), INTRODUCTION]
    files = sorted(_files(proto), key=lambda file: ORDER.index(Path(file.name).stem))
    for file in files:
        comments = {tuple(spot.path): spot.leading_comments for spot in file.source_code_info.location}
        parts += [f"## {Path(file.name).name}", f"{code(file.package)}. {_sentence(comments, (SYNTAX,))}"]
        for index, service in enumerate(file.service):
            parts += _service(service, comments, (SERVICE, index))
        for index, message in enumerate(file.message_type):
            parts += _message(message, comments, (MESSAGE, index))
        for index, enum in enumerate(file.enum_type):
            parts += _enum(enum, comments, (ENUM, index))
    return "\n\n".join(parts)


def _files(proto: Path) -> list[FileDescriptorProto]:
    sources = sorted(str(path) for path in (proto / "bettercompute").rglob("*.proto"))
    with tempfile.NamedTemporaryFile() as described:
        options = [f"--proto_path={proto}", f"--proto_path={WELL_KNOWN}", "--include_source_info"]
        status = protoc.main(["protoc", *options, f"--descriptor_set_out={described.name}", *sources])
        if status != 0:
            raise SystemExit(status)
        return list(FileDescriptorSet.FromString(Path(described.name).read_bytes()).file)


def _sentence(comments: Comments, path: tuple[int, ...]) -> str:
    return " ".join(comments.get(path, "").split())


def _service(service: ServiceDescriptorProto, comments: Comments, path: tuple[int, ...]) -> Iterator[str]:
    yield f"### {service.name}"
    yield _sentence(comments, path)
    rows = []
    for index, method in enumerate(service.method):
        asked = ("stream " if method.client_streaming else "") + _linked(method.input_type)
        answered = ("stream " if method.server_streaming else "") + _linked(method.output_type)
        rows.append((code(method.name), asked, answered, _sentence(comments, (*path, METHOD, index))))
    yield table(("call", "takes", "gives", "meaning"), rows)


def _message(message: DescriptorProto, comments: Comments, path: tuple[int, ...]) -> Iterator[str]:
    yield f"### {message.name}"
    yield _sentence(comments, path)
    maps = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
    rows = [
        (str(field.number), code(field.name), _type(field, message, maps), _sentence(comments, (*path, FIELD, index)))
        for index, field in enumerate(message.field)
    ]
    if rows:
        yield table(("no.", "field", "type", "meaning"), rows)
    for index, nested in enumerate(message.nested_type):
        if nested.name not in maps:
            yield from _message(nested, comments, (*path, NESTED, index))
    for index, enum in enumerate(message.enum_type):
        yield from _enum(enum, comments, (*path, NESTED_ENUM, index))


def _enum(enum: EnumDescriptorProto, comments: Comments, path: tuple[int, ...]) -> Iterator[str]:
    yield f"### {enum.name}"
    yield _sentence(comments, path)
    rows = [
        (str(value.number), code(value.name), _sentence(comments, (*path, VALUE, index)))
        for index, value in enumerate(enum.value)
    ]
    yield table(("no.", "value", "meaning"), rows)


def _type(field: FieldDescriptorProto, message: DescriptorProto, maps: Mapping[str, DescriptorProto]) -> str:
    entry = maps.get(field.type_name.rpartition(".")[2]) if field.type_name else None
    if entry is not None:
        key, value = entry.field
        return f"map of {_single(key)} to {_single(value)}"
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {_single(field)}"
    if field.HasField("oneof_index") and not field.proto3_optional:
        return f"{_single(field)}, one of {code(message.oneof_decl[field.oneof_index].name)}"
    return _single(field)


def _single(field: FieldDescriptorProto) -> str:
    return SCALARS[field.type] if field.type in SCALARS else _linked(field.type_name)


def _linked(full_name: str) -> str:
    name = full_name.rpartition(".")[2]
    return f"[{name}](#{anchor(name)})" if full_name.startswith(".bettercompute.") else code(full_name.lstrip("."))
