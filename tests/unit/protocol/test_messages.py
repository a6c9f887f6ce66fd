import ast
from pathlib import Path

from bettercompute.protocol import messages
from bettercompute.protocol.gen.agent.v1 import commands_pb2, inventory_pb2, session_pb2
from bettercompute.protocol.gen.common.v1 import common_pb2
from bettercompute.protocol.gen.driver.v1 import driver_pb2
from bettercompute.protocol.gen.site.v1 import site_pb2

FROZEN = (commands_pb2, inventory_pb2, session_pb2, common_pb2)


def declared(module):
    """The names that a .proto file declares at its top: messages, enums and enum values."""
    file = module.DESCRIPTOR
    values = [value.name for enum in file.enum_types_by_name.values() for value in enum.values]
    return [*file.message_types_by_name, *file.enum_types_by_name, *values]


def test_every_name_of_the_frozen_packages_is_exported():
    for module in FROZEN:
        for name in declared(module):
            assert getattr(messages, name) == getattr(module, name)


def test_no_name_is_declared_twice():
    names = [name for module in FROZEN for name in declared(module)]
    assert len(names) == len(set(names))


def test_drafts_have_namespaces():
    assert messages.site is site_pb2
    assert messages.driver is driver_pb2


def test_packages_keep_their_names_on_the_wire():
    assert messages.Hello.DESCRIPTOR.full_name == "bettercompute.agent.v1.Hello"
    assert messages.Signature.DESCRIPTOR.full_name == "bettercompute.common.v1.Signature"
    assert messages.Hello.__module__ == "bettercompute.protocol.gen.agent.v1.session_pb2"


def test_enums_begin_with_an_unspecified_zero():
    for module in (*FROZEN, site_pb2, driver_pb2):
        for enum in module.DESCRIPTOR.enum_types_by_name.values():
            assert enum.values_by_number[0].name.endswith("_UNSPECIFIED")


def test_command_states_have_their_signed_numbers():
    names = ["PENDING", "DISPATCHED", "ACKED", "RUNNING", "SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED", "REJECTED"]
    assert messages.CommandState.items() == [
        ("COMMAND_STATE_UNSPECIFIED", 0),
        *((f"COMMAND_STATE_{name}", number) for number, name in enumerate(names, 1)),
    ]


def test_times_are_milliseconds_in_64_bits():
    """A `_ms` that is a moment is int64; a `_ms` that is a length is uint32. Nothing ends in another unit of time."""
    for module in (*FROZEN, site_pb2, driver_pb2):
        for message in module.DESCRIPTOR.message_types_by_name.values():
            for field in message.fields:
                if field.name.endswith("_ms"):
                    assert field.type in (field.TYPE_INT64, field.TYPE_UINT32), field.full_name
                assert not field.name.endswith(("_s", "_at", "_time")), field.full_name


def test_only_this_door_opens_on_generated_code():
    root = Path(messages.__file__).parents[1]
    for path in root.rglob("*.py"):
        if path == Path(messages.__file__) or "gen" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.startswith("bettercompute.protocol.gen") for name in names), path
