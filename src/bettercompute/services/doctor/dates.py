"""When the end of a certificate begins to be a matter."""

from __future__ import annotations

from bettercompute.services.doctor.finding import Finding, failed, ok, warning

DAY_MS = 86_400_000
# Of its life: a sixth is time to plan, a thirtieth is not. Of CAs, which live for years, never more than so long.
WARNS_SHARE, FAILS_SHARE = 6, 30
WARNS_MAX_MS = 90 * DAY_MS
FAILS_MAX_MS = 14 * DAY_MS


def judge_life(what: str, *, left_ms: int, life_ms: int, cure: str) -> Finding:
    """Judge what is left of a certificate's life."""
    if left_ms <= 0:
        return failed(f"{what} has expired", cure=cure)
    sentence = f"{what} is good for another {_words(left_ms)}"
    if left_ms < min(FAILS_MAX_MS, life_ms // FAILS_SHARE):
        return failed(sentence, cure=cure)
    if left_ms < min(WARNS_MAX_MS, life_ms // WARNS_SHARE):
        return warning(sentence, cure=cure)
    return ok(sentence)


def _words(left_ms: int) -> str:
    if left_ms >= 2 * DAY_MS:
        return f"{left_ms // DAY_MS} days"
    return f"{left_ms // 3_600_000} h" if left_ms >= 7_200_000 else f"{left_ms // 60_000} min"
