"""How weights are quantized: what tells it, what plain tensors they stand for, what computes these.

A *scheme* is one module in ``schemes``, found by itself; :mod:`.scheme` says what it consists of.
:mod:`.survey` finds what the schemes understand of a checkpoint and what they do not, and
:mod:`.statement` is what its files say about it. A *recipe* is a row in :mod:`.recipes`: what
``--quantize`` makes of the weights that :mod:`.linear_weights` finds.
"""
