"""Where the words of a Triton channel lie: int64 arrays that the kernels and the host read alike."""

from __future__ import annotations

from enum import IntEnum

MAX_RANKS = 64

# A rank's control area has one entry a peer, written by that peer alone. An entry has two halves, for even and odd epochs:
# no rank ends an epoch before it heard of that epoch from every peer, so a word is never overwritten before it was read.
FLAG, CREDIT_TAG, CREDIT_PLACE = range(3)
WORDS_A_HALF = 4
WORDS_A_PEER = 2 * WORDS_A_HALF
CONTROL_BYTES = MAX_RANKS * WORDS_A_PEER * 8

# Tags of agreed layouts are smaller. A rank that ends an epoch without sending says why.
REJECTED_TAG = 0xFFFFFFFF  # the host rejected this rank's input
BAD_VALUE_TAG = 0xFFFFFFFE  # its kernel found an offset or index that is wrong
PASSED_ON_TAG = 0xFFFFFFFD  # another rank failed first
FIRST_ABORT_TAG = PASSED_ON_TAG

NO_PROBLEM = (1 << 63) - 1
PROBLEM_SHIFT = 56  # a problem is {kind: 7 bits, position: 56 bits}, so that the smallest is the first to report
FIRST_OFFSET, LAST_OFFSET, DECREASING, OUT_OF_RANGE = range(4)

BAD_VALUE = 9  # how a call ended, beside the codes of `agreement`: this rank has a wrong offset or index


class State(IntEnum):
    """In device memory: what the kernels of one channel keep between them."""

    EPOCH = 0  # of the last finished call
    NEXT_TILE = 1
    FAILED = 2  # code of the running call
    FAILED_PEER = 3
    PROBLEM = 4  # the first wrong offset or index of the running call
    BROKEN = 5  # a wait timed out: no later call can work
    SUPPRESSED = 6  # a failure that the host has not raised yet: nothing is updated
    WAITED = 7  # {programs that have ended, nanoseconds they waited}, of a running call
    TILES_DONE = 8  # one a destination


STATE_WORDS = State.TILES_DONE + MAX_RANKS


class Record(IntEnum):
    """In host memory that the device addresses. The host clears SERIAL when it has read; the device writes only when clear."""

    TIMEOUT_NS = 0  # written by the host
    WAIT_NS = 1  # total that calls waited beyond their own compute
    SERIAL = 2
    CODE = 3
    PHASE = 4
    PEER = 5
    LATE = 6  # bit r: rank r did not arrive
    REJECTED = 7  # bit r: rank r rejected its input
    BAD_VALUE = 8  # bit r: rank r found a bad offset or index
    EPOCH = 9
    CALL = 10
    PROBLEM_KIND = 11
    PROBLEM_AT = 12
    PROBLEM_VALUE = 13
    PROBLEM_FEATURE = 14


RECORD_WORDS = 16
