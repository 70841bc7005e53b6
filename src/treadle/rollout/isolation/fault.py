"""What a call of a user's function raises when it failed."""


class CallFault(Exception):
    """A call failed; the text is the cause, ready for `Sample.failure`."""
