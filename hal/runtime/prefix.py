"""Which token prefixes have their state in which slot: a radix tree, and nothing of the states."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hal.runtime.pool import Slot
    from hal.selection import Selection

Tokens = tuple[int, ...]


def model_identity(selection: Selection, weights: str = "") -> str:
    """A digest of all that a state depends on beside its tokens.

    That is the model's spec, the dtypes, the layouts and the shard. Two checkpoints of one config
    are alike in these: `weights` has to tell them apart where one index serves both.
    """
    options = selection.options
    known = (
        selection.model,
        selection.dtype,
        options.state_dtype,
        options.tp,
        sorted(selection.layouts.items()),
        weights,
    )
    return sha256(repr(known).encode()).hexdigest()


@dataclass(slots=True, eq=False)
class _Node:
    """A prefix: `edge` are its tokens behind its parent's, `depth` counts all of them.

    `paths` counts the recorded sequences that end here, `holders` who reads the slot's state.
    """

    parent: _Node | None
    edge: Tokens
    depth: int
    children: dict[int, _Node] = field(default_factory=dict)
    slot: Slot | None = None
    paths: int = 0
    holders: int = 0


class PrefixIndex:
    """Cached states by model and token prefix, least recently used first to go.

    It owns no memory: whoever stores a slot here frees it once `evict` or `remove` gives it back.
    A prefix of one model is never found for another. Sequences that are only recorded hold no
    state; they show where prompts part, which is where a state is worth keeping.
    """

    def __init__(self) -> None:
        self._roots: dict[str, _Node] = {}
        self._entries: OrderedDict[Slot, _Node] = OrderedDict()

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The slots of all cached states, the least recently used first."""
        return tuple(self._entries)

    def record(self, model: str, tokens: Tokens) -> None:
        """Note a sequence that is being served; `forget` has to follow."""
        self._reach(model, tokens).paths += 1

    def forget(self, model: str, tokens: Tokens) -> None:
        """Take back one `record` of the same sequence."""
        node = self._node(model, tokens)
        if node is None or not node.paths:
            raise ValueError(f"prefix: forget of {len(tokens)} tokens that were not recorded")
        node.paths -= 1
        _prune(node)

    def forks(self, model: str, tokens: Tokens) -> list[int]:
        """The lengths, rising, at which known sequences leave `tokens`, or end within them."""
        depths = [node.depth for node, whole in self._walk(model, tokens) if whole]
        return depths if not depths or depths[-1] < len(tokens) else depths[:-1]

    def longest(self, model: str, tokens: Tokens) -> tuple[Slot, int] | None:
        """The slot and length of the longest cached prefix that is shorter than `tokens`."""
        found = None
        for node, whole in self._walk(model, tokens):
            if whole and node.slot is not None and node.depth < len(tokens):
                found = node.slot, node.depth
        return found

    def has(self, model: str, tokens: Tokens) -> bool:
        """Whether the state after exactly these tokens is cached."""
        node = self._node(model, tokens)
        return node is not None and node.slot is not None

    def store(self, model: str, tokens: Tokens, slot: Slot) -> bool:
        """Keep `slot` as the state after `tokens`; False, and nothing kept, where there is one."""
        if not tokens:
            raise ValueError("prefix: the state after no token is none")
        if slot in self._entries:
            raise ValueError(f"prefix: slot {slot} holds a cached state already")
        node = self._reach(model, tokens)
        if node.slot is not None:
            return False
        node.slot = slot
        self._entries[slot] = node
        return True

    def hold(self, slot: Slot) -> None:
        """Count one reader more, and one use: a held state is neither evicted nor removed."""
        self._entry(slot).holders += 1
        self._entries.move_to_end(slot)

    def release(self, slot: Slot) -> None:
        """Count one reader less."""
        node = self._entry(slot)
        if not node.holders:
            raise ValueError(f"prefix: slot {slot} is not held")
        node.holders -= 1

    def holders(self, slot: Slot) -> int:
        """How many readers a cached state has."""
        return self._entry(slot).holders

    @property
    def evictable(self) -> bool:
        """Whether `evict` would give a slot."""
        return any(not node.holders for node in self._entries.values())

    def evict(self) -> Slot | None:
        """Give up the least recently used state that nobody holds; None where all are held."""
        for slot, node in self._entries.items():
            if not node.holders:
                self.remove(slot)
                return slot
        return None

    def remove(self, slot: Slot) -> None:
        """Give up one cached state; its slot is the caller's again."""
        node = self._entry(slot)
        if node.holders:
            raise ValueError(f"prefix: slot {slot} is held by {node.holders}, so it has to stay")
        del self._entries[slot]
        node.slot = None
        _prune(node)

    def drop(self, slots: Iterable[Slot]) -> None:
        """Forget the states in slots that were freed elsewhere, held or not; others are skipped."""
        for slot in slots:
            node = self._entries.pop(slot, None)
            if node is not None:
                node.slot, node.holders = None, 0
                _prune(node)

    def _entry(self, slot: Slot) -> _Node:
        node = self._entries.get(slot)
        if node is None:
            raise ValueError(f"prefix: slot {slot} holds no cached state")
        return node

    def _walk(self, model: str, tokens: Tokens) -> Iterator[tuple[_Node, bool]]:
        """The nodes along `tokens`, root left out; False for a last one that they part from."""
        node: _Node | None = self._roots.get(model)
        while node is not None and node.depth < len(tokens):
            node = node.children.get(tokens[node.depth])
            if node is not None:
                whole = _common(node, tokens) == len(node.edge)
                yield node, whole
                node = node if whole else None

    def _node(self, model: str, tokens: Tokens) -> _Node | None:
        """The node of exactly these tokens."""
        last = None
        for node, whole in self._walk(model, tokens):
            last = node if whole and node.depth == len(tokens) else None
        return last

    def _reach(self, model: str, tokens: Tokens) -> _Node:
        """The node of exactly these tokens, made where it lacks."""
        last = self._roots.setdefault(model, _Node(None, (), 0))
        for node, whole in self._walk(model, tokens):
            last = node if whole else _split(node, _common(node, tokens))
        if last.depth == len(tokens):
            return last
        leaf = _Node(last, tokens[last.depth :], len(tokens))
        last.children[leaf.edge[0]] = leaf
        return leaf


@dataclass(frozen=True, slots=True)
class CachedSlots:
    """Lets an index follow a pool that it is attached to: a freed slot holds no cached state."""

    index: PrefixIndex

    def release(self, slots: Iterable[Slot]) -> None:
        """Forget the cached states of these slots."""
        self.index.drop(slots)


def _common(node: _Node, tokens: Tokens) -> int:
    """How many tokens of the edge go on along `tokens`."""
    begin = node.depth - len(node.edge)
    part = tokens[begin : node.depth]
    if part == node.edge:
        return len(part)
    pairs = zip(node.edge, part, strict=False)
    return next((i for i, (ours, given) in enumerate(pairs) if ours != given), len(part))


def _split(node: _Node, count: int) -> _Node:
    """A node between `node` and its parent, after the first `count` tokens of the edge."""
    parent, edge = node.parent, node.edge
    middle = _Node(parent, edge[:count], node.depth - len(edge) + count)
    if parent is not None:
        parent.children[edge[0]] = middle
    node.parent, node.edge = middle, edge[count:]
    middle.children[node.edge[0]] = node
    return middle


def _prune(node: _Node) -> None:
    """Drop nodes that say nothing any more, from here towards the root."""
    while (parent := node.parent) is not None and node.slot is None and not node.paths:
        if len(node.children) > 1:
            return
        del parent.children[node.edge[0]]
        for child in node.children.values():
            child.parent, child.edge = parent, node.edge + child.edge
            parent.children[child.edge[0]] = child
            return
        node = parent
