"""The sessions of tests/contract/gateway once more, with the gateway's connections under its database role."""

from __future__ import annotations

import pytest

from tests.contract.gateway.conftest import config, node_ca  # noqa: F401  # fixtures
from tests.contract.gateway.test_session import *  # noqa: F403  # the suite, under the role
from tests.security.test_gateway_role import granted, rig  # noqa: F401  # fixtures

pytestmark = pytest.mark.long
