from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.deadlines import LONG_S
from tests.support.process_table import open_descriptors
from torchmix.errors import OpenFilesLimit
from torchmix.steps.worker.messages import Channel


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    one, other = map(Channel, socket.socketpair())
    yield one, other
    one.close()
    other.close()


def pipe_holding(text: bytes) -> int:
    reader, writer = os.pipe()
    os.write(writer, text)
    os.close(writer)
    return reader


def test_messages_come_whole_in_order_and_with_their_own_descriptors(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    sizes = [3, 0, 1 << 22, 1]
    descriptors = [[], [pipe_holding(b"a"), pipe_holding(b"b")], [], [pipe_holding(b"c")]]

    def send_all() -> None:
        for size, own in zip(sizes, descriptors, strict=True):
            one.send(bytes([size % 251]) * size, own)
            for descriptor in own:
                os.close(descriptor)

    sender = threading.Thread(target=send_all)  # a socket holds less than the largest of them
    sender.start()
    found = [other.receive(30) for _ in sizes]
    sender.join()
    assert [message for message, _ in found] == [bytes([size % 251]) * size for size in sizes]
    texts = [[os.read(descriptor, 9) for descriptor in own] for _, own in found]
    assert texts == [[], [b"a", b"b"], [], [b"c"]]
    for _, own in found:
        for descriptor in own:
            os.close(descriptor)


def test_what_was_said_before_the_other_side_went_is_still_heard(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    other.send(b"never received")
    one.send(b"more")
    one.send(b"last words")
    one.close()
    with pytest.raises(EOFError):
        other.send(b"are you there?")
    assert [other.receive(30), other.receive(30)] == [(b"more", []), (b"last words", [])]
    with pytest.raises(EOFError):
        other.receive(30)
    with pytest.raises(EOFError):
        other.send(b"hello?")


def test_a_side_that_goes_in_the_middle_of_a_message_is_an_end(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    one._socket.sendall((100).to_bytes(8, "little") + (0).to_bytes(4, "little") + b"only these")
    one.close()
    with pytest.raises(EOFError, match="in the middle of a message"):
        other.receive(30)


def test_a_wait_ends_with_its_time(ends: tuple[Channel, Channel]) -> None:
    with pytest.raises(TimeoutError):
        ends[0].receive(0)


def test_shutting_down_wakes_both_sides_and_may_come_late(ends: tuple[Channel, Channel]) -> None:
    one, woken = ends[0], []

    def wait(end: Channel) -> None:
        with pytest.raises(EOFError):
            end.receive(30)
        woken.append(end)

    threads = [threading.Thread(target=wait, args=(end,)) for end in ends]
    for thread in threads:
        thread.start()
    time.sleep(0.05)  # they wait by now, most likely; it must hold either way
    one.shut_down()
    for thread in threads:
        thread.join(LONG_S)
    assert len(woken) == 2
    one.close()
    one.shut_down()  # of a closed one: nothing happens


def test_descriptors_beyond_the_limit_are_an_error_that_says_so(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = ends
    sent = [pipe_holding(b"a"), pipe_holding(b"b")]
    one.send(b"two", sent)
    receive = socket.recv_fds
    # As the kernel does at the limit: it gives those for which there is room.
    monkeypatch.setattr(socket, "recv_fds", lambda sock, size, _: receive(sock, size, 1))
    before = open_descriptors() if Path("/proc/self/fd").exists() else None
    with pytest.raises(OpenFilesLimit, match="ulimit -n"):
        other.receive(30)
    if before is not None:
        assert open_descriptors() <= before
    for descriptor in sent:
        os.close(descriptor)
