"""The HTTP API's OpenAPI document, as `/openapi.json` gives it."""

from __future__ import annotations

import json
from typing import cast

from bettercompute.api.app import create_app
from bettercompute.api.context import ApiContext


def page() -> str:
    """Return docs/reference/openapi.json. The schema needs no context: nothing is asked of the one given here."""
    app = create_app(cast("ApiContext", None))
    return json.dumps(app.openapi(), indent=2, ensure_ascii=False)
