"""What can go wrong between ranks. Bad input is a plain ValueError."""


class CommunicationError(RuntimeError):
    """A collective could not finish: the message names the operator, the phase, this rank and the peers at fault."""


class PeerTimeoutError(CommunicationError):
    """Peers did not arrive within the bound (`set_timeout`)."""


class PeerLostError(CommunicationError):
    """A peer's process ended."""


class PeerAbortedError(CommunicationError):
    """A peer rejected its own input for this call, or gave up on the channel earlier."""


class BackendUnavailableError(RuntimeError):
    """The backend that was asked for (or required) cannot run here; the message says why."""
