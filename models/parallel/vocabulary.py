"""How many rows a vocabulary-parallel table has."""


def padded_vocabulary(vocabulary: int, multiple: int) -> int:
    """`vocabulary` rounded up to a multiple: rows of the table, the same for every number of ranks."""
    return -(-vocabulary // multiple) * multiple
