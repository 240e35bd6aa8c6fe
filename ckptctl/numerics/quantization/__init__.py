"""Detection and dequantization of quantization schemes, and recipes of ``--quantize``.

A *scheme* is a module in ``schemes``, loaded automatically and described in :mod:`.scheme`.
:mod:`.survey` finds the quantized weights of a checkpoint, supported and unsupported, and
:mod:`.statement` reads its quantization configs. A *recipe* in :mod:`.recipes` defines how
``--quantize`` quantizes the weights that :mod:`.linear_weights` finds.
"""
