"""The least time a call can take: what its bytes and FLOPs need at measured rates. Pure arithmetic; who measures is elsewhere.

Ranks that share a card share its memory, so the bytes of all of them count, at the card's rates. On a link of its own the
exchange can hide behind the compute, or that behind it: the longer of the two is the limit. So it is with FLOPs and bytes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Traffic:
    """Bytes that all ranks together must move in one call, and what they must compute."""

    gathered: int = 0  # rows read at random places
    read: int = 0  # in order
    written: int = 0
    copied: int = 0  # read once and written once
    sent: int = 0  # to another rank, each way of the link
    flops: int = 0  # of matrix products

    def share(self, world: int) -> Traffic:
        """One rank's, of `world` that have the same."""
        return Traffic(**{name: amount // world for name, amount in asdict(self).items()})


@dataclass(frozen=True)
class Rates:
    """Bytes a second, all ranks of the card together while all of them are busy."""

    read: float
    copy: float  # bytes read + bytes written
    gather: float | None = None  # random rows of the shape's width
    flops: float | None = None  # a second, in products of the shape's dtype


@dataclass(frozen=True)
class Limit:
    ms: float
    formula: str


def of_shared_memory(traffic: Traffic, rates: Rates) -> Limit:
    """Every byte of every rank once, at the rate of its kind; or the products, where these take longer."""
    parts = [
        ("gathered", traffic.gathered, rates.gather or rates.read),
        ("read", traffic.read, rates.read),
        ("written", traffic.written, rates.copy),
        ("copied", 2 * traffic.copied, rates.copy),
    ]
    parts = [part for part in parts if part[1]]
    seconds = sum(nbytes / rate for _, nbytes, rate in parts)
    words = [f"{nbytes / 1e6:.4g} MB {name} at {rate / 1e9:.4g} GB/s" for name, nbytes, rate in parts]
    return _or_products(Limit(seconds * 1e3, "all ranks: " + " + ".join(words)), traffic, rates)


def of_host_memory(traffic: Traffic, read: float, copy: float, flops: float | None = None) -> Limit:
    """One CPU rank's share of `traffic`: a written row costs its line twice, read for ownership and written back."""
    seconds = (traffic.gathered + traffic.read) / read + 2 * (traffic.written + traffic.copied) / copy
    moved = Limit(seconds * 1e3, "one rank's bytes at streaming rates")
    return _or_products(moved, traffic, Rates(read, copy, flops=flops))


def _or_products(moved: Limit, traffic: Traffic, rates: Rates) -> Limit:
    """The longer of `moved` and the products at their rate."""
    if not traffic.flops or rates.flops is None:
        return moved
    products_ms = traffic.flops / rates.flops * 1e3
    words = f"{traffic.flops / 1e9:.4g} GFLOP at {rates.flops / 1e9:.4g} GFLOP/s: {products_ms:.4g} ms"
    return Limit(max(moved.ms, products_ms), f"max of {words}, and {moved.formula}: {moved.ms:.4g} ms")


def of_host_link(traffic: Traffic, one_way: float, lookups_ms: float | None, compute: str = "lookups") -> Limit:
    """The longer of the lookups (or other compute) alone and the copy of all ranks' sent bytes, both ways at once, each at
    `one_way` bytes/s."""
    copy_ms = traffic.sent / one_way * 1e3
    words = f"{traffic.sent / 1e6:.4g} MB sent at {one_way / 1e9:.4g} GB/s each way: {copy_ms:.4g} ms"
    if lookups_ms is None:
        return Limit(copy_ms, words)
    return Limit(max(lookups_ms, copy_ms), f"max of {compute} {lookups_ms:.4g} ms and {words}")


def of_own_link(lookups_ms: float | None, exchange_ms: float, compute: str = "lookups") -> Limit:
    """Ranks on cards of their own: the longer of the fastest lookups (or other compute) and the fastest exchange."""
    if lookups_ms is None:
        return Limit(exchange_ms, f"the fastest exchange alone, {exchange_ms:.4g} ms")
    return Limit(
        max(lookups_ms, exchange_ms),
        f"max of {compute} {lookups_ms:.4g} ms and exchange {exchange_ms:.4g} ms, each alone",
    )


def gather_rate(traffic: Traffic, ms: float, read: float, copy: float) -> float:
    """Bytes a second of looked-up rows, of lookups that took `ms`: ids and results are taken off at their own rates.

    Never below what all bytes of the call make together, should the rates for the rest be too low.
    """
    seconds = ms / 1e3
    rest = traffic.read / read + traffic.written / copy
    everything = (traffic.gathered + traffic.read + traffic.written) / seconds
    return max(everything, traffic.gathered / (seconds - rest)) if rest < seconds else everything
