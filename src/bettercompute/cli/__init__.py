"""The two commands: `better-compute` and `bcd`.

Their imports take a moment, and who presses Ctrl-C in it wants an end and no traceback: this package is the first that
both import, and from here on an interrupt that nobody catches ends the process silently, by the signal as before.
"""

import sys
from types import TracebackType


def _silent_when_interrupted(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)


sys.excepthook = _silent_when_interrupted
