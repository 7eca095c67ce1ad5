"""The prefix index against a plain dictionary, its evictions, and the identity of models."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import hal
from hal.runtime.pool import Slot
from hal.runtime.prefix import CachedSlots, PrefixIndex, model_identity
from hal.selection import Selection
from support.model_configs import tiny

tokens = st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple)
models = st.sampled_from(["one", "two"])


class Index(RuleBasedStateMachine):
    """Every call beside the same call on dictionaries keyed by whole prefixes."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.states: dict[tuple[str, tuple[int, ...]], int] = {}
        self.order: list[int] = []
        self.held: list[int] = []
        self.recorded: list[tuple[str, tuple[int, ...]]] = []
        self.next = 1

    @rule(model=models, prefix=tokens)
    def store(self, model: str, prefix: tuple[int, ...]) -> None:
        stored = self.index.store(model, prefix, self.next)
        assert stored == ((model, prefix) not in self.states)
        if stored:
            self.states[model, prefix] = self.next
            self.order.append(self.next)
            self.next += 1

    @rule(model=models, sequence=tokens)
    def record(self, model: str, sequence: tuple[int, ...]) -> None:
        self.index.record(model, sequence)
        self.recorded.append((model, sequence))

    @precondition(lambda self: self.recorded)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        model, sequence = data.draw(st.sampled_from(self.recorded))
        self.recorded.remove((model, sequence))
        self.index.forget(model, sequence)

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.order))
        self.index.hold(slot)
        self.held.append(slot)
        self.order.remove(slot)
        self.order.append(slot)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.held))
        self.held.remove(slot)
        self.index.release(slot)

    @rule()
    def evict(self) -> None:
        wanted = next((slot for slot in self.order if slot not in self.held), None)
        assert self.index.evictable == (wanted is not None)
        assert self.index.evict() == wanted
        if wanted is not None:
            self._drop(wanted)

    @precondition(lambda self: set(self.order) - set(self.held))
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(set(self.order) - set(self.held))))
        self.index.remove(slot)
        self._drop(slot)

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        slots = data.draw(st.sets(st.sampled_from(self.order)))
        self.index.drop([*sorted(slots), self.next])
        for slot in slots:
            self.held = [each for each in self.held if each != slot]
            self._drop(slot)

    def _drop(self, slot: int) -> None:
        self.order.remove(slot)
        self.states = {key: each for key, each in self.states.items() if each != slot}

    @rule(model=models, prompt=tokens)
    def look_up(self, model: str, prompt: tuple[int, ...]) -> None:
        known = [
            (len(p), slot)
            for (m, p), slot in self.states.items()
            if m == model and len(p) < len(prompt) and prompt[: len(p)] == p
        ]
        wanted = max(known, default=None)
        assert self.index.longest(model, prompt) == (wanted and wanted[::-1])
        assert self.index.has(model, prompt) == ((model, prompt) in self.states)

    @rule(model=models, prompt=tokens)
    def part(self, model: str, prompt: tuple[int, ...]) -> None:
        """Where another sequence ends within the prompt, or leaves it beside a third one."""
        paths = {p for m, p in [*self.states, *self.recorded] if m == model}
        ends = {len(p) for p in paths if prompt[: len(p)] == p}
        for depth in range(1, len(prompt)):
            along = {p[depth] for p in paths if len(p) > depth and p[:depth] == prompt[:depth]}
            if len(along) > 1:
                ends.add(depth)
        assert self.index.forks(model, prompt) == sorted(e for e in ends if e < len(prompt))

    @invariant()
    def slots_are_those_stored_in_the_order_of_their_use(self) -> None:
        assert list(self.index.slots) == self.order
        assert all(self.index.holders(s) == self.held.count(s) for s in self.order)


TestIndex = Index.TestCase
TestIndex.settings = settings(max_examples=80, stateful_step_count=40)


def nodes(index: PrefixIndex) -> int:
    """Nodes of the tree, the roots left out."""

    def count(node: object) -> int:
        return sum(1 + count(child) for child in node.children.values())  # type: ignore[attr-defined]

    return sum(count(root) for root in index._roots.values())


@given(st.lists(tokens, max_size=12))
def test_nothing_is_left_of_what_was_taken_back(sequences: list[tuple[int, ...]]) -> None:
    index = PrefixIndex()
    for slot, sequence in enumerate(sequences, 1):
        index.record("model", sequence)
        index.store("model", sequence, slot)
    while index.evict() is not None:
        pass
    for sequence in sequences:
        index.forget("model", sequence)
    assert nodes(index) == 0


@given(st.lists(tokens, min_size=1, max_size=12))
def test_the_tree_has_no_more_nodes_than_ends_and_partings(
    sequences: list[tuple[int, ...]],
) -> None:
    index = PrefixIndex()
    for sequence in sequences:
        index.record("model", sequence)
    assert nodes(index) <= 2 * len(set(sequences)) - 1


def test_a_long_prompt_is_one_edge_and_found_at_once() -> None:
    index, prompt = PrefixIndex(), tuple(range(200_000))
    index.store("model", prompt[:-1], 1)
    index.record("model", prompt)
    assert nodes(index) == 2
    assert index.longest("model", prompt) == (1, len(prompt) - 1)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda i: i.store("m", (), 5), "the state after no token is none"),
        (lambda i: i.store("m", (1, 2), 1), "slot 1 holds a cached state already"),
        (lambda i: i.hold(9), "slot 9 holds no cached state"),
        (lambda i: i.release(1), "slot 1 is not held"),
        (lambda i: i.forget("m", (1, 2)), "forget of 2 tokens that were not recorded"),
        (lambda i: i.forget("m", (1,)), "forget of 1 tokens that were not recorded"),
        (lambda i: (i.hold(1), i.remove(1)), "slot 1 is held by 1, so it has to stay"),
    ],
)
def test_misuse_is_an_error_and_changes_nothing(call: object, text: str) -> None:
    index = PrefixIndex()
    index.store("m", (1,), 1)
    with pytest.raises(ValueError, match=text):
        call(index)  # type: ignore[operator]
    assert index.slots == (1,)
    assert index.has("m", (1,))
    assert nodes(index) == 1


QWEN = tiny("qwen3_5_text")


def in_a_process(code: str, config: dict[str, object]) -> str:
    """What code prints that reads a config from stdin."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(config),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def selected(config: dict[str, object], **options: object) -> Selection:
    """The selection by manifests alone."""
    selection = hal.explain("cpu", config, **options).selection
    assert selection is not None
    return selection


def identity(config: dict[str, object] = QWEN, weights: str = "", **options: object) -> str:
    return model_identity(selected(config, **options), weights)


def test_a_model_is_known_by_all_that_its_states_depend_on() -> None:
    others = [
        identity(tiny("lfm2")),
        identity(tiny("qwen3_5_text", linear_conv_kernel_dim=3)),
        identity(dtype="bfloat16"),
        identity(tp=hal.Shard(0, 2)),
        identity(tp=hal.Shard(1, 2)),
        identity(weights="another checkpoint"),
    ]
    assert len({identity(), *others}) == len(others) + 1
    assert identity() == identity(prefix_cache=True, speculative=hal.Speculative(4))


def test_layouts_are_part_of_the_identity() -> None:
    selection = selected(QWEN)
    turned = replace(selection, layouts={**selection.layouts, "recurrent": "KV"})
    assert model_identity(turned) != model_identity(selection)


def test_the_dtype_of_states_is_part_of_the_identity() -> None:
    selection = selected(QWEN)
    other = replace(selection, options=replace(selection.options, state_dtype="bfloat16"))
    assert model_identity(other) != model_identity(selection)


def test_an_attached_index_forgets_what_its_pool_takes_back() -> None:
    index = PrefixIndex()
    index.record("m", (5, 5))
    for slot in (1, 2, 3):
        index.store("m", (5,) * slot, Slot(slot))
    index.hold(Slot(2))
    CachedSlots(index).release([Slot(2), Slot(3), Slot(9)])
    assert index.slots == (1,)
    assert index.longest("m", (5, 5, 5, 5)) == (1, 1)
    assert nodes(index) == 2
    assert index.store("m", (5, 5), Slot(2))
    assert index.holders(Slot(2)) == 0


def test_the_identity_is_the_same_in_another_process() -> None:
    code = (
        "import sys, json, hal; from hal.runtime.prefix import model_identity; "
        "print(model_identity(hal.explain('cpu', json.load(sys.stdin)).selection))"
    )
    assert in_a_process(code, QWEN) == identity()


def test_the_index_imports_no_torch() -> None:
    code = "import sys, hal.runtime.prefix, hal.runtime.placement; print('torch' in sys.modules)"
    assert in_a_process(code, {}) == "False"
