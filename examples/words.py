"""The demo's vocabulary: six kinds of word that follow each other in a circle, ten words each."""

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")

KINDS = tuple(
    tuple(words.split())
    for words in (
        "the a one every this that my your our another",
        "small grey quiet bright slow wild warm green young tired",
        "cat river child boat fox stone bird sailor moon wind",
        "sings sleeps waits dances runs returns listens falls shines turns",
        "softly alone again slowly outside nearby tonight gladly often below",
        "and while but because until before when so as after",
    )
)

VOCABULARY = (*SPECIAL, *(word for kind in KINDS for word in kind))


def table(step: int, factor: int, shift: int) -> list[int]:
    """Return, for every id, the id of one word that stands `step` kinds further on.

    Word i of a kind leads to word `factor * i + shift * kind` of the other kind, modulo ten.
    Special tokens count as words of the last kind and are never led to.
    """
    size = len(KINDS[0])
    places = [(len(KINDS) - 1, i) for i in range(len(SPECIAL))]
    places += [(kind, i) for kind in range(len(KINDS)) for i in range(size)]
    return [
        len(SPECIAL) + (kind + step) % len(KINDS) * size + (factor * i + shift * kind) % size
        for kind, i in places
    ]
