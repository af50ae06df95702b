"""What a lab lacks, in a line."""


class LabError(RuntimeError):
    """One line for the user: what is missing or went wrong, and what to do about it."""
