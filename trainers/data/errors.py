"""The one error for input that cannot be used."""


class DataError(ValueError):
    """Unusable input. The message says which file (and line or feature), what is wrong and what is allowed."""
