"""What the failures of a request mean. Importing this imports no client."""

from __future__ import annotations

REFUSED = (400, 413, 422)
"""What a server says of a request that it understands and does not want."""
PASSING = (408, 409, 425, 429)
"""What it says when the same request may be answered later, beside every 5xx."""
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 8.0


def status_of(error: Exception) -> int | None:
    """The HTTP status of a reply; None where there was none, or one that is no error."""
    import openai

    return error.status_code if isinstance(error, openai.APIStatusError) else None


def is_refusal(error: Exception) -> bool:
    """Whether the server is at work and does not want this request."""
    return status_of(error) in REFUSED


def may_pass(error: Exception) -> bool:
    """Whether the same request may be answered a little later."""
    import openai

    return isinstance(error, openai.APIConnectionError) or status_of(error) in PASSING or _is_broken(error)


def may_be_the_prompts(error: Exception) -> bool:
    """Whether the prompt may be to blame: it is refused, breaks the server's work, or gets a reply that is none."""
    import openai

    is_no_reply = isinstance(error, ValueError | openai.APIResponseValidationError)
    return is_refusal(error) or _is_broken(error) or is_no_reply


def _is_broken(error: Exception) -> bool:
    return (status_of(error) or 0) >= 500


def pause_after(error: Exception, attempt: int) -> float:
    """Seconds to wait before the next attempt: as many as the server asks for, else twice as many each time.

    Args:
        error: of the last attempt.
        attempt: its number, from 0.
    """
    import openai

    asked = error.response.headers.get("retry-after") if isinstance(error, openai.APIStatusError) else None
    try:
        return max(0.0, float(asked or ""))
    except ValueError:  # it did not ask, or named a date
        return min(FIRST_PAUSE_S * 2**attempt, LONGEST_PAUSE_S)
