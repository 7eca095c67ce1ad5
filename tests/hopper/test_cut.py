"""Cuts leave no chunk out, and are only made where they are faster."""

from hypothesis import given
from hypothesis import strategies as st

from hal_cuda.hopper.cut import Cut, cut_of

sizes = st.integers(1, 5000), st.integers(1, 300), st.integers(1, 200)


@given(*sizes)
def test_a_cut_is_never_slower_than_whole_rows(chunks: int, blocks: int, processors: int) -> None:
    cut = cut_of(chunks, blocks, processors)
    assert cut.microseconds(chunks) <= Cut().microseconds(chunks)


@given(*sizes)
def test_the_first_phase_has_a_processor_for_every_walk_of_a_wave(
    chunks: int, blocks: int, processors: int
) -> None:
    cut = cut_of(chunks, blocks, processors)
    between = 2 * blocks * (cut.parts - 2)
    assert cut.parts == 1 or blocks + -(-between // cut.waves) <= processors


@given(st.integers(1, 5000), st.integers(3, 40), st.integers(1, 4))
def test_the_parts_hold_every_chunk(chunks: int, parts: int, waves: int) -> None:
    cut = Cut(parts, waves)
    end = cut.longest(chunks)
    assert 2 * end + (parts - 2) * (end // waves) >= chunks
    assert end % waves == 0


def test_rows_that_fill_a_card_stay_whole() -> None:
    assert cut_of(1000, 132, 132) == Cut()


def test_a_rank_of_eight_heads_is_cut_finer_than_all_of_them() -> None:
    assert cut_of(128, 16, 132).parts > cut_of(128, 64, 132).parts > 1
