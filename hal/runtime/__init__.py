"""What a selection becomes when it is bound: pool, step metadata, layers. torch from here on."""
