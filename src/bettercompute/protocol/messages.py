"""The only door to the generated code: each message, enum and enum value of agent/v1 and common/v1 by its proto name.

`messages.Hello`, `messages.Lane`, `messages.LANE_CONTROL`. The draft packages keep namespaces of their own,
`messages.site` and `messages.driver`, so that a draft is seen where it is used. Nothing else imports `protocol.gen`
(an import contract).
"""

from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message

from bettercompute.protocol.gen.agent.v1.commands_pb2 import *  # noqa: F403 - the names are the .proto files' own
from bettercompute.protocol.gen.agent.v1.inventory_pb2 import *  # noqa: F403 - as above
from bettercompute.protocol.gen.agent.v1.session_pb2 import *  # noqa: F403 - as above
from bettercompute.protocol.gen.common.v1.common_pb2 import *  # noqa: F403 - as above
from bettercompute.protocol.gen.driver.v1 import driver_pb2
from bettercompute.protocol.gen.site.v1 import site_pb2

# What every generated class is.
ProtoMessage = Message
# google.protobuf.Any: a message with its type's name, as in CommandBody.payload.
PackedMessage = AnyMessage
site = site_pb2
driver = driver_pb2
