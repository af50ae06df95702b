"""Exposed communication is counted once: waits as they are, an unfused exchange as a whole."""

import time

from fused_ops import exposed


def test_waits_add_up_and_are_handed_out_once():
    exposed.exposed_wait_ms()
    exposed.add_ns(2_000_000)
    exposed.add_ns(500_000)
    assert exposed.exposed_wait_ms() == 2.5
    assert exposed.exposed_wait_ms() == 0.0


def test_a_whole_exchange_takes_the_place_of_the_waits_inside():
    exposed.exposed_wait_ms()
    exposed.add_ns(1_000_000)
    with exposed.whole():
        exposed.add_ns(500_000_000)  # a wait that is part of the whole
        time.sleep(0.01)
    total = exposed.exposed_wait_ms()
    assert 11.0 <= total < 200.0
