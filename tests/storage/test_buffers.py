"""Buffers: page-aligned, under the budget, reused, and woken up when all stops."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event, Lock, Thread

import numpy as np
import pytest

from marlin_convert.storage.buffers import BufferPool, aligned_buffer

PAGE = 4096


@pytest.mark.parametrize("size", [0, 1, PAGE - 1, PAGE, PAGE + 1, 1_000_003])
def test_aligned_zeroed_and_writable(size: int) -> None:
    buffer = aligned_buffer(size)
    assert buffer.dtype == np.uint8
    assert buffer.shape == (size,)
    assert buffer.ctypes.data % PAGE == 0
    assert not buffer.any()
    buffer[:] = 7
    assert (buffer == 7).all()


@pytest.mark.parametrize("size", [0, 1, PAGE, PAGE + 1, 50_000])
def test_what_is_taken_is_whole_pages(size: int) -> None:
    with BufferPool(1 << 20).take(size) as buffer:
        assert buffer.size >= max(size, 1)
        assert buffer.size % PAGE == 0
        assert buffer.ctypes.data % PAGE == 0


def test_a_buffer_is_used_again() -> None:
    pool = BufferPool(1 << 20)
    with pool.take(10 * PAGE) as first:
        place = first.ctypes.data
    with pool.take(9 * PAGE) as second:
        assert second.ctypes.data == place
        with pool.take(9 * PAGE) as third:
            assert third.ctypes.data != place
    with pool.take(4 * PAGE) as small:
        assert small.size < 10 * PAGE, "a small job does not block a buffer more than twice its size"


def test_the_closest_fit_is_taken() -> None:
    pool = BufferPool(1 << 20)
    with pool.take(20 * PAGE), pool.take(12 * PAGE) as close, pool.take(16 * PAGE):
        place = close.ctypes.data
    with pool.take(11 * PAGE) as again:
        assert again.ctypes.data == place


def test_kept_buffers_make_room() -> None:
    pool = BufferPool(10 * PAGE)
    with pool.take(5 * PAGE), pool.take(5 * PAGE):
        pass
    with pool.take(10 * PAGE) as whole:
        assert whole.size == 10 * PAGE


def test_more_than_the_budget_is_refused_at_once() -> None:
    pool = BufferPool(10 * PAGE)
    with (
        pytest.raises(ValueError, match=f"a job needs {11 * PAGE} bytes, the budget is {10 * PAGE}"),
        pool.take(10 * PAGE + 1),
    ):
        pass


def test_a_failing_job_gives_its_buffer_back() -> None:
    pool = BufferPool(10 * PAGE)
    with pytest.raises(RuntimeError), pool.take(10 * PAGE):
        raise RuntimeError
    with pool.take(10 * PAGE) as buffer:
        assert buffer.size == 10 * PAGE


def test_a_job_waits_for_room() -> None:
    pool, got, let_go = BufferPool(10 * PAGE), Event(), Event()

    def wait() -> None:
        let_go.wait()
        with pool.take(6 * PAGE):
            got.set()

    waiter = Thread(target=wait)
    waiter.start()
    with pool.take(6 * PAGE):
        let_go.set()
        assert not got.wait(0.05)
    assert got.wait(10)
    waiter.join()


def test_never_more_than_the_budget_whoever_takes() -> None:
    pool, lock, start = BufferPool(20 * PAGE), Lock(), Barrier(8)
    held = [0, 0]

    def work(seed: int) -> int:
        random, done = np.random.default_rng(seed), 0
        start.wait()
        for _ in range(200):
            with pool.take(int(random.integers(1, 20 * PAGE))) as buffer:
                with lock:
                    held[0] += buffer.size
                    held[1] = max(held)
                buffer[:: PAGE // 2] = seed
                assert (buffer[:: PAGE // 2] == seed).all(), "nobody else writes to it"
                with lock:
                    held[0] -= buffer.size
            done += 1
        return done

    with ThreadPoolExecutor(8) as workers:
        assert list(workers.map(work, range(8))) == [200] * 8
    assert held[0] == 0
    assert held[1] <= 20 * PAGE


def test_stop_wakes_those_who_wait() -> None:
    pool, waiting = BufferPool(10 * PAGE), Event()
    ends: list[type[BaseException]] = []

    def wait() -> None:
        waiting.set()
        try:
            with pool.take(10 * PAGE):
                ends.append(AssertionError)
        except InterruptedError:
            ends.append(InterruptedError)

    with pool.take(PAGE):
        waiter = Thread(target=wait)
        waiter.start()
        waiting.wait()
        pool.stop()
        waiter.join(10)
    assert ends == [InterruptedError]
    with pytest.raises(InterruptedError), pool.take(PAGE):
        pass
