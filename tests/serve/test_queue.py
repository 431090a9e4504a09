"""The queue with a clock of its own: limits, estimates, fairness, batches and deadlines."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from support.fake_runner import model
from tritium.serve.engine import Job, Queued, Refused
from tritium.serve.queue import Limits, Queue

KEYS = ("ann", "bob", "eve")


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def job(name, **changes):
    return Job(**{"id": name, "model": "tiny", "prompt": "", "width": 64, "height": 64, "steps": 4, **changes})


def queue(clock=None, limits=None, **facts):
    facts = {"seconds": {(64, 64): 1.0}, **facts}
    return Queue((model(**facts),), limits or Limits(), clock or Clock())


def run(entries, queue, clock, seconds):
    """Let a batch run."""
    clock.now += seconds
    queue.finish(entries, measured=True)


def ids(entries):
    return [entry.job.id for entry in entries]


def test_the_first_job_waits_for_nothing():
    waiting = queue()
    assert waiting.admit(job("a"), slots=1) == Queued(ahead=0, wait=0.0)
    assert ids(waiting.take()) == ["a/0"]
    assert (len(waiting), waiting.running, waiting.seconds) == (0, 1, 0)


def test_waiting_is_estimated_from_what_runs_and_waits():
    clock = Clock()
    waiting = queue(clock)
    waiting.admit(job("a", steps=8), slots=1)
    waiting.take()
    clock.now = 0.5
    assert waiting.admit(job("b"), slots=1) == Queued(ahead=0, wait=1.5)
    assert waiting.admit(job("c"), slots=1) == Queued(ahead=1, wait=2.5)
    # Two slots halve it.
    assert waiting.wait(job("d"), slots=2).wait == pytest.approx(3.5 / 2)


def test_measured_times_correct_the_estimates():
    clock = Clock()
    waiting = queue(clock)
    for seconds, expected in ((3.0, 3.0), (3.0, 3.0), (1.0, 2.4)):
        waiting.admit(job("a"), slots=1)
        run(waiting.take(), waiting, clock, seconds)
        assert waiting.estimate(job("b")) == pytest.approx(expected)
    # Another size has its own.
    assert waiting.estimate(job("b", width=96)) == pytest.approx(1.5)


def test_a_failed_batch_measures_nothing():
    clock = Clock()
    waiting = queue(clock)
    waiting.admit(job("a"), slots=1)
    batch = waiting.take()
    clock.now = 50.0
    waiting.finish(batch, measured=False)
    assert waiting.estimate(job("b")) == 1.0


def test_a_full_queue_names_the_time_of_a_retry():
    waiting = queue(limits=Limits(length=2))
    waiting.admit(job("a"), slots=1)
    waiting.admit(job("b"), slots=1)
    with pytest.raises(Refused) as refused:
        waiting.admit(job("c"), slots=1)
    assert (refused.value.code, refused.value.retry_after) == ("queue_full", 1.0)
    assert str(refused.value) == "the queue is full: 2 images that take about 2.0 s are waiting"
    assert len(waiting) == 2


def test_more_images_than_the_queue_holds_are_useless_to_retry():
    with pytest.raises(Refused) as refused:
        queue(limits=Limits(length=2)).admit(job("a", n=3), slots=1)
    assert refused.value.retry_after is None


def test_seconds_limit_the_queue_but_not_a_single_job():
    waiting = queue(limits=Limits(seconds=3.0))
    waiting.admit(job("long", steps=40), slots=1)
    with pytest.raises(Refused) as refused:
        waiting.admit(job("a"), slots=2)
    assert refused.value.retry_after == pytest.approx((10 + 1 - 3) / 2)


def test_one_key_has_only_its_share():
    waiting = queue(limits=Limits(length=4, share=0.5))
    waiting.admit(job("a", key="ann", n=2), slots=1)
    with pytest.raises(Refused, match="your share of the queue is full"):
        waiting.admit(job("b", key="ann"), slots=1)
    waiting.admit(job("c", key="bob", n=2), slots=1)


def test_a_deadline_that_cannot_be_met_is_refused_early():
    waiting = queue()
    for name in "ab":
        waiting.admit(job(name), slots=1)
    waiting.admit(job("c", timeout=3.0), slots=1)
    with pytest.raises(Refused) as refused:
        waiting.admit(job("d", timeout=3.5), slots=1)
    assert (refused.value.code, refused.value.retry_after) == ("deadline", 0.5)
    assert "about 4.0 s (3.0 s of them in the queue)" in str(refused.value)
    with pytest.raises(Refused) as refused:
        waiting.admit(job("e", timeout=0.5), slots=1)
    assert refused.value.retry_after is None


def test_a_late_job_is_found_before_it_runs():
    clock = Clock()
    waiting = queue(clock)
    waiting.admit(job("a", timeout=2.0), slots=1)
    clock.now = 1.0
    assert waiting.late() == []
    clock.now = 1.01
    assert ids(waiting.late()) == ["a/0"]


def test_a_higher_priority_goes_first_within_its_key():
    waiting = queue()
    for name, priority in (("a", 0), ("b", 5), ("c", 0)):
        waiting.admit(job(name, priority=priority), slots=1)
    assert [waiting.take()[0].job.id for _ in "abc"] == ["b/0", "a/0", "c/0"]


def test_batches_are_legal_sizes_of_one_group():
    waiting = queue(batches={(64, 64): (2, 4)})
    for name, changes in (
        ("a", {}),
        ("b", {"steps": 5}),
        ("c", {}),
        ("d", {"key": "bob"}),
        ("e", {"fidelity": "exact"}),
    ):
        waiting.admit(job(name, **changes), slots=1)
    clock = waiting._clock
    assert waiting.take() == []
    assert waiting.hold == pytest.approx(0.005)
    clock.now = 0.006
    # Three have the group of "a"; 4 are compiled, 3 are not.
    assert ids(waiting.take()) == ["a/0", "c/0"]
    assert ids(waiting.take()) == ["d/0"]
    assert sorted(ids(waiting.take()) + ids(waiting.take())) == ["b/0", "e/0"]


def test_a_full_batch_waits_for_nobody():
    waiting = queue(batches={(64, 64): (2,)})
    waiting.admit(job("a", n=2), slots=1)
    assert ids(waiting.take()) == ["a/0", "a/1"]


def test_the_window_is_a_tenth_of_a_step():
    waiting = queue(batches={(64, 64): (2,)}, seconds={(64, 64): 0.04})
    waiting.admit(job("a"), slots=1)
    assert waiting.take() == []
    assert waiting.hold == pytest.approx(0.001)


def test_sizes_that_were_never_measured_to_pay_run_alone():
    waiting = queue(batches={(96, 64): (2,)})
    waiting.admit(job("a", n=2), slots=1)
    assert ids(waiting.take()) == ["a/0"]


def test_out_of_memory_removes_a_batch_size():
    waiting = queue(batches={(64, 64): (2, 4)})
    waiting.forbid(job("a"), 4)
    assert waiting.legal(job("b")) == (1, 2)
    waiting.forbid(job("a"), 2)
    assert waiting.legal(job("b")) == (1,)
    assert waiting.legal(job("b", fidelity="close")) == (1, 2, 4)


def test_an_image_that_runs_again_goes_first_and_alone():
    waiting = queue(batches={(64, 64): (2,)})
    waiting.admit(job("a", n=2), slots=1)
    batch = waiting.take()
    waiting.finish(batch, measured=False)
    waiting.admit(job("b", n=2), slots=1)
    for entry in batch:
        waiting.again(entry)
    assert [ids(waiting.take()) for _ in range(3)] == [["a/0"], ["a/1"], ["b/0", "b/1"]]


def test_a_removed_job_leaves_nothing():
    waiting = queue()
    waiting.admit(job("a", n=3), slots=1)
    waiting.admit(job("b"), slots=1)
    assert ids(waiting.remove("a")) == ["a/0", "a/1", "a/2"]
    assert waiting.remove("a") == []
    assert (len(waiting), waiting.seconds) == (1, 1.0)


@pytest.mark.parametrize("wrong", [{"length": 0}, {"seconds": 0}, {"share": 0}, {"share": 1.5}])
def test_limits_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match="a queue needs"):
        Limits(**wrong)


def test_the_estimate_knows_whose_turn_is_next():
    """A light user behind the backlog of another one waits for a turn, not for the backlog."""
    waiting = queue()
    waiting.admit(job("heavy", key="ann", n=20), slots=1)
    waiting.take()
    assert waiting.admit(job("a", key="bob", timeout=3.5), slots=1) == Queued(ahead=0, wait=1.0)
    assert waiting.admit(job("b", key="bob", n=2, timeout=9.0), slots=1).ahead == 2
    assert waiting.wait(job("urgent", key="bob", priority=1), slots=1).ahead == 0
    assert [waiting.take()[0].job.id for _ in range(6)] == ["a/0", "heavy/1", "b/0", "heavy/2", "b/1", "heavy/3"]


def test_a_heavy_user_does_not_delay_a_light_one():
    """A key with long jobs, one after the other, gets half of the time and not half of the turns."""
    clock = Clock()
    waiting = queue(clock, limits=Limits(length=1000, seconds=1e6))
    for index in range(200):
        waiting.admit(job(f"light{index}", key="ann"), slots=1)
    spent = dict.fromkeys(KEYS, 0.0)
    for index in range(150):
        if not any(entry.job.key == "bob" for entry in waiting._entries()):
            waiting.admit(job(f"heavy{index}", key="bob", steps=40), slots=1)
        batch = waiting.take()
        spent[batch[0].job.key] += batch[0].seconds
        run(batch, waiting, clock, batch[0].seconds)
    assert abs(spent["ann"] - spent["bob"]) <= 11.0


Actions = st.lists(
    st.one_of(
        st.tuples(
            st.just("submit"),
            st.sampled_from(KEYS),
            st.integers(1, 4),
            st.sampled_from((4, 8, 40)),
            st.sampled_from((None, 5.0, 100.0)),
            st.sampled_from(("exact", None)),
        ),
        st.tuples(st.just("take"), st.floats(0.0, 3.0)),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("fail"), st.booleans()),
    ),
    max_size=60,
)


class History:
    """A queue that is driven by random actions, and checked after each of them."""

    def __init__(self):
        self.clock = Clock()
        self.limits = Limits(length=12, seconds=60.0)
        self.queue = queue(self.clock, self.limits, batches={(64, 64): (2, 3)})
        self.jobs = []
        self.ran = {}
        self.gone = set()

    def submit(self, key, n, steps, timeout, fidelity):
        new = job(str(len(self.jobs)), key=key, n=n, steps=steps, timeout=timeout, fidelity=fidelity)
        before = len(self.queue)
        try:
            queued = self.queue.admit(new, slots=1)
        except Refused as error:
            refused = error
        else:
            refused = None
            assert queued.ahead <= before
            assert len(self.queue) == before + n
            self.jobs.append(new)
        if refused is not None:
            assert len(self.queue) == before
            assert refused.code == "deadline" or before + n > 12 or self.queue.seconds > 0
            assert refused.retry_after is None or refused.retry_after > 0

    def take(self, seconds):
        for entry in self.queue.late():
            self.gone.add(entry.parent.id)
            self.queue.remove(entry.parent.id)
        batch = self.queue.take()
        if not batch:
            # It may wait for members of a batch, and then not for long.
            assert not len(self.queue) or self.queue.hold <= 0.0051
            self.clock.now += 0.006
            return
        head = batch[0].job
        assert all(entry.job.group == head.group for entry in batch)
        assert len(batch) in ((1,) if head.fidelity == "exact" else (1, 2, 3))
        for entry in batch:
            assert entry.job.id not in self.ran
            assert entry.deadline is None or self.clock.now + entry.seconds <= entry.deadline
            self.ran[entry.job.id] = entry
        run(batch, self.queue, self.clock, seconds)

    def cancel(self, index):
        if index < len(self.jobs):
            self.gone.add(self.jobs[index].id)
            self.queue.remove(self.jobs[index].id)

    def fail(self, memory):
        batch = self.queue.take()
        if not batch:
            return
        self.queue.finish(batch, measured=False)
        if memory and len(batch) > 1:
            self.queue.forbid(batch[0].job, len(batch))
            assert len(batch) not in self.queue.legal(batch[0].job)
        for entry in batch:
            self.queue.again(entry)


@settings(max_examples=150, deadline=None)
@given(Actions)
def test_whatever_happens_every_image_runs_once_or_is_gone(actions):
    history = History()
    for name, *values in actions:
        getattr(history, name)(*values)
        assert len(history.queue) <= 12
        assert history.queue.running == 0
    for _ in range(400):
        if not len(history.queue):
            break
        history.take(0.5)
    assert len(history.queue) == 0
    for each in history.jobs:
        images = {single.id for single in each.singles()}
        assert each.id in history.gone or images <= set(history.ran)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from((4, 8, 20))), min_size=3, max_size=60))
def test_backlogged_keys_get_equal_seconds(submitted):
    """While two keys wait, what they were given differs by at most one of their longest jobs."""
    clock = Clock()
    waiting = queue(clock, Limits(length=100, seconds=1e6))
    left = dict.fromkeys(KEYS, 0)
    for index, (key, steps) in enumerate(submitted):
        waiting.admit(job(str(index), key=key, steps=steps), slots=1)
        left[key] += 1
    spent = dict.fromkeys(KEYS, 0.0)
    backlogged = [key for key in KEYS if left[key]]
    while len(waiting):
        batch = waiting.take()
        key = batch[0].job.key
        spent[key] += batch[0].seconds
        left[key] -= 1
        clock.now += batch[0].seconds
        waiting.finish(batch, measured=False)
        if not all(left[key] for key in backlogged):
            break
        assert max(spent[key] for key in backlogged) - min(spent[key] for key in backlogged) <= 5.0
