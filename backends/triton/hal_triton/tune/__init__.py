"""Make a table of block sizes for a card: sweep candidates, hold each against what is shipped.

`sweep` chooses, `classes` says on which shapes, `candidates` among what. No step imports this.
"""
