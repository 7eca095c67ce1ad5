"""N-gram drafts against a search of the whole text, and which of them hold."""

from hypothesis import given
from hypothesis import strategies as st

from hal.runtime.drafts import SIZES, Drafter, NGrams, agreed
from hal.runtime.request import Request

texts = st.lists(st.integers(0, 3), max_size=30)


def found(text: list[int]) -> int | None:
    """Where the latest earlier occurrence of the longest end goes on, by looking everywhere."""
    for size in SIZES:
        for begin in range(len(text) - size - 1, -1, -1):
            if size <= len(text) and text[begin : begin + size] == text[len(text) - size :]:
                return begin + size
    return None


def grams_of(text: list[int]) -> NGrams:
    grams = NGrams()
    for token in text:
        grams.push(token)
    return grams


@given(texts, st.integers(0, 8))
def test_drafts_are_what_followed_the_longest_end_the_last_time(
    text: list[int], count: int
) -> None:
    drafts = grams_of(text).propose(count)
    begin = found(text)
    if begin is None:
        assert drafts == ()
        return
    assert len(drafts) == count
    whole = [*text, *drafts]
    assert list(drafts) == whole[begin : begin + count]


def test_a_run_of_one_token_is_taken_to_go_on() -> None:
    assert grams_of([5, 5, 5]).propose(4) == (5, 5, 5, 5)
    assert grams_of([1, 2, 1, 2, 1]).propose(3) == (2, 1, 2)


def test_the_longer_end_wins_over_the_later_one() -> None:
    text = [1, 2, 3, 4, 9, 8, 3, 4, 7, 1, 2, 3, 4]
    assert grams_of(text).propose(1) == (9,)


def test_one_token_alone_is_no_end() -> None:
    assert grams_of([1, 2, 1]).propose(3) == ()


@given(texts, st.integers(1, 6), st.integers(-2, 8))
def test_a_drafter_gives_no_more_than_its_width_and_what_is_asked(
    text: list[int], width: int, most: int
) -> None:
    request = Request(0, (1, 2, *text), 9)
    drafts = Drafter(width).propose(request, most)
    assert len(drafts) <= max(0, min(width - 1, most))


@given(texts.filter(bool), st.lists(st.integers(0, 3), max_size=12), st.integers(0, 30))
def test_a_drafter_keeps_up_with_a_request_that_grows(
    prompt: list[int], output: list[int], asked_at: int
) -> None:
    request, drafter = Request(0, tuple(prompt), 99), Drafter(5)
    for number, token in enumerate(output):
        if number == asked_at:
            drafter.propose(request, 4)
        request.output.append(token)
    assert drafter.propose(request, 4) == grams_of([*prompt, *output]).propose(4)


def test_requests_do_not_draft_from_each_other() -> None:
    drafter = Drafter(4)
    one, two = Request(0, (1, 2, 3, 1, 2), 9), Request(1, (7, 1, 2), 9)
    assert drafter.propose(one, 3) == (3, 1, 2)
    assert drafter.propose(two, 3) == ()
    drafter.forget(one)
    drafter.forget(one)
    assert drafter.propose(two, 3) == ()


@given(
    st.lists(st.integers(0, 2), max_size=6),
    st.lists(st.integers(0, 2), min_size=7, max_size=7),
    st.frozensets(st.integers(0, 2), max_size=2),
)
def test_what_holds_is_what_decoding_one_by_one_would_give(
    drafts: list[int], choices: list[int], stop: frozenset[int]
) -> None:
    chosen = choices[: len(drafts) + 1]
    kept = [chosen[0]]
    while kept[-1] not in stop and len(kept) <= len(drafts) and drafts[len(kept) - 1] == kept[-1]:
        kept.append(chosen[len(kept)])
    assert agreed(tuple(drafts), tuple(chosen), stop) == len(kept)
