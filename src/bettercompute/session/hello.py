"""Hello: both ends of it ("Hello", "The Hello transaction", decisions 1, 4, 5, 7).

`decide` is the transaction's one decision.
"""

from __future__ import annotations

from bettercompute.protocol import messages
from bettercompute.session.hello_plan import HelloFacts, HelloPlan, HelloRefusal


def decide(facts: HelloFacts, hello: messages.Hello) -> HelloPlan | HelloRefusal:
    """Return everything that a Hello writes and begins, or why it is refused.

    Pure: the same facts give the same plan.
    """
    raise NotImplementedError
